"""Which map can be trusted on your model: `judge` measures methods and controls on your own photos."""

from rectgrad.verdict.judging import Verdict, judge

__all__ = ["Verdict", "judge"]
