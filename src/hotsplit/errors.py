"""Every error that hotsplit raises: one tree, one shape of message, one exit code per class.

A message is one line that says what is wrong, what was got, what was wanted and what to do next. The
command line prints it and exits with the class's `exit_code`; a library user reads the values as attributes.

    >>> error = ConfigError("HOTSPLIT_DYN_STEPS", got="'0'", wanted="an integer >= 1", do="leave it out for 2000")
    >>> str(error)
    "HOTSPLIT_DYN_STEPS: got '0'; wanted an integer >= 1; leave it out for 2000"
    >>> error.exit_code
    2
"""

from __future__ import annotations


class HotsplitError(Exception):
    """The root of the tree.

    Args:
        what: The thing that is wrong: a file and place in it, a setting, a model.
        got: What was found.
        wanted: What would have been right.
        do: The next step for whoever reads this.
        **values: The same facts as values; each becomes an attribute.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        got: str | None = None,
        wanted: str | None = None,
        do: str | None = None,
        **values: object,
    ) -> None:
        details = [f"got {got}" if got else "", f"wanted {wanted}" if wanted else "", do or ""]
        text = "; ".join(part for part in details if part)
        super().__init__(" ".join((f"{what}: {text}" if text else what).split()))
        self.what, self.got, self.wanted, self.do = what, got, wanted, do
        for name, value in values.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: the message is not the constructor's argument."""
        return (_rebuild, (type(self), str(self), self.__dict__))


def _rebuild(kind: type[HotsplitError], message: str, state: dict[str, object]) -> HotsplitError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(HotsplitError, ValueError):
    """A setting is unknown, cannot be parsed, or is out of its range."""

    exit_code = 2


class CheckpointError(HotsplitError, ValueError):
    """A model folder lacks tensors, has an unreadable header, or has nothing to split."""


class HistogramError(HotsplitError, ValueError):
    """A histogram is malformed; the message names file, layer, expert and value."""


class TraceError(HotsplitError, ValueError):
    """A routing trace is malformed."""


class RatesError(HotsplitError, ValueError):
    """A file of measured rates is malformed or implausible."""


class PlanError(HotsplitError, ValueError):
    """A plan is malformed or cannot be made."""


class BudgetError(PlanError):
    """Nothing useful fits the budget, or the budget exceeds the memory there is."""


class PlanMismatchError(PlanError):
    """A plan, or a histogram, was made for another model."""


class BankError(HotsplitError, RuntimeError):
    """A bank cannot be built or read."""


class SwapError(BankError):
    """A staged copy was lost, or a publish came out of order."""


class EngineError(HotsplitError, RuntimeError):
    """An engine cannot be driven as asked."""


class UnsupportedEngineError(EngineError):
    """An engine's version, architecture or hook is not known."""
