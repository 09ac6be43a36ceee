"""One tree, one table, and the same class on both sides of the wire."""

from __future__ import annotations

import grpc
import pytest

from moorage.sessions import errors as e
from moorage.sessions.proto import sessions_pb2 as pb

STATUS = grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (e.InvalidArgument("x"), STATUS.INVALID_ARGUMENT),
        (e.TemplateError("x"), STATUS.INVALID_ARGUMENT),
        (e.ContextTooLong("x"), STATUS.INVALID_ARGUMENT),
        (e.MessageTooLarge("x"), STATUS.RESOURCE_EXHAUSTED),
        (e.SessionNotFound("x"), STATUS.NOT_FOUND),
        (e.ToolResultConflict("x"), STATUS.ALREADY_EXISTS),
        (e.SequenceOutOfRange("x"), STATUS.OUT_OF_RANGE),
        (e.Unauthenticated("x"), STATUS.UNAUTHENTICATED),
        (e.SessionBusy("x"), STATUS.FAILED_PRECONDITION),
        (e.ToolsPending("x"), STATUS.FAILED_PRECONDITION),
        (e.SessionClosed("x"), STATUS.FAILED_PRECONDITION),
        (e.EngineBusy("x"), STATUS.RESOURCE_EXHAUSTED),
        (e.ServerDraining("x"), STATUS.UNAVAILABLE),
        (e.StoreUnavailable("x"), STATUS.UNAVAILABLE),
        (e.DeadlineExceeded("x"), STATUS.DEADLINE_EXCEEDED),
        (TimeoutError(), STATUS.DEADLINE_EXCEEDED),
        (e.Cancelled("x"), STATUS.CANCELLED),
        (e.TurnFailed("x"), STATUS.INTERNAL),
        (ZeroDivisionError("x"), STATUS.INTERNAL),
    ],
)
def test_every_error_has_one_status(error: Exception, status: grpc.StatusCode) -> None:
    assert e.status_of(error) is status


def _leaves(root: type[e.MoorageError]) -> list[type[e.MoorageError]]:
    below = [leaf for cls in root.__subclasses__() for leaf in _leaves(cls)]
    return below or [root]


@pytest.mark.parametrize("cls", [c for c in _leaves(e.MoorageError) if c is not e.StaleWrite])
def test_a_leaf_comes_back_as_itself(cls: type[e.MoorageError]) -> None:
    detail = e.to_detail(cls("the text", field="a.b", retry_after_s=2.0))
    back = e.from_detail(pb.ErrorDetail.FromString(detail.SerializeToString()))
    assert (type(back), back.message, back.field, back.retry_after_s) == (
        cls, "the text", "a.b", 2.0,
    )  # fmt: skip


def test_an_unexpected_error_keeps_its_text_on_the_server() -> None:
    detail = e.to_detail(RuntimeError("password=hunter2"))
    assert detail.code == "internal"
    assert "hunter2" not in detail.message


def test_a_code_of_a_newer_server_is_still_an_error() -> None:
    assert isinstance(e.from_detail(pb.ErrorDetail(code="from_the_future")), e.InternalError)


def test_every_engine_fault_has_an_error() -> None:
    from moorage.engine import FaultCode

    for code in FaultCode:
        assert isinstance(e.from_fault(code.value, "x"), e.MoorageError)
        if code is not FaultCode.INTERNAL:
            assert type(e.from_fault(code.value, "x")) is not e.InternalError, code
