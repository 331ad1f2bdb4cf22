"""A question with a number to guess, asked before a notebook measures it."""

from dataclasses import dataclass

from .tables import text


@dataclass
class Prediction:
    """A question and the reader's guess; `reveal` answers it."""

    question: str
    guess: float | None
    unit: str

    def reveal(self, measured: float, because: str = "") -> None:
        """Prints the measured number beside the guess."""
        unit = f" {self.unit}" if self.unit else ""
        answer = f"{self.question}\n    measured: {text(measured)}{unit}"
        if self.guess is not None:
            ratio = f", {self.guess / measured:.2f} of it" if measured else ""
            answer += f"    your guess: {text(self.guess)}{unit}{ratio}"
        print(answer + (f"\n    {because}" if because else ""))


def predict(question: str, guess: float | None = None, unit: str = "") -> Prediction:
    """Notes the guess, None for none.

    Raises:
        ValueError: a guess that is not a number.
    """
    if guess is not None and (isinstance(guess, bool) or not isinstance(guess, (int, float))):
        raise ValueError(f"guess {guess!r} is not a number")
    print(question + ("" if guess is None else f"    your guess: {text(guess)} {unit}".rstrip()))
    return Prediction(question, guess, unit)
