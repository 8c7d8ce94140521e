"""The library's errors: whose fault it was decides the class, and with it the exit code."""


class AedflError(Exception):
    """Anything that this library raises on purpose; the message is one sentence for a person."""


class UserError(AedflError):
    """The user's mistake: a key, a value, a file. Shown without a traceback; exit code 2."""


class PeerError(AedflError):
    """A peer's mistake: bytes or a model that do not fit. Refused, counted, logged; never fatal here."""


class Deadlock(AedflError):
    """Every program of a simulation waits and nothing can wake one; names who waits for what."""
