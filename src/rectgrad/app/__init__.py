"""The explorer: a page on which a person drops a photo and sees what the network looked at."""
