"""The explorer: a web page that shows what a network looked at in a photo.

`server` starts it, `routes` handles requests, `service` computes maps, and `work` schedules the computations.
The page itself is in `page/`.
"""
