"""The same work given to other simulators, each in an environment of its own."""
