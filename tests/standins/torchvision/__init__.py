"""The part of torchvision's interface that rectgrad uses, with a tiny network."""
