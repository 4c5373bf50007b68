"""The ground: what every package may use. It imports no other package of prl."""
