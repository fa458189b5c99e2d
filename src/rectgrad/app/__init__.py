"""The explorer: a web page that shows what a network looked at in a photo.

`server` starts it, `routes` answers the page, `service` computes, `work` decides what runs when; the page itself
is in `page/`.
"""
