"""The explorer: a web page that shows what a network looked at in a photo.

`server` starts it, `routes` answers the page, `service` computes, `work` decides what runs when. The page
itself is in `page/`.
"""
