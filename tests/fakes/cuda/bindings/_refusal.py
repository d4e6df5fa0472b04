"""How the parts of the fake say that a call fails."""

from ._enums import CUresult


class Refusal(Exception):
    """``code`` is what the call answers; ``why`` goes to the record."""

    def __init__(self, code: CUresult, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


def invalid(why: str) -> Refusal:
    return Refusal(CUresult.CUDA_ERROR_INVALID_VALUE, why)
