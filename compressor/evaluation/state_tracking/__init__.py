"""Can a model carry a state: group word problems, parity and bracketed modular arithmetic, all generated."""
