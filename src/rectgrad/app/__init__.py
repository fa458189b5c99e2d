"""The explorer: a web page that shows what a network looked at in a photo."""
