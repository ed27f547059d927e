"""What request headers mean."""

import time

import pytest

from service.call import Call, read_headers
from service.errors import InvalidRequest
from service.runtime.lanes import Lane
from service.tokenization.texts import Cutting


def call(**headers: str) -> Call:
    made = Call("id", time.monotonic())
    read_headers(made, {name.replace("_", "-"): value for name, value in headers.items()}, 300.0)
    return made


def left_s(made: Call) -> float:
    return made.deadline - made.started


def test_without_headers_the_service_decides() -> None:
    made = call()
    assert (left_s(made), made.lane, made.item_errors, made.ndjson) == (pytest.approx(300), None, False, False)
    assert made.started <= time.monotonic()


def test_a_client_may_give_less_time_but_not_more() -> None:
    assert left_s(call(x_request_timeout_ms="1500")) == pytest.approx(1.5)
    assert left_s(call(x_request_timeout_ms="0.5")) == pytest.approx(0.0005)
    assert left_s(call(x_request_timeout_ms="400000")) == pytest.approx(300)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "86400001", "1,2"])
def test_a_timeout_that_is_none_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout-ms") as refused:
        call(x_request_timeout_ms=value)
    assert refused.value.param == "x-request-timeout-ms"


def test_the_lane_is_named_in_any_case() -> None:
    assert call(x_lane="BULK").lane == Lane.BULK
    assert call(x_lane="interactive").lane == Lane.INTERACTIVE


@pytest.mark.parametrize("value", ["", "fast", "0"])
def test_an_unknown_lane_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-lane"):
        call(x_lane=value)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("true", True), ("True", True), ("0", False), ("", False), ("no", False)])
def test_errors_by_item_are_asked_for(value: str, wanted: bool) -> None:
    assert call(x_item_errors=value).item_errors is wanted


def test_ndjson_is_asked_for_among_others() -> None:
    assert call(accept="application/json;q=0.5, application/x-ndjson").ndjson


def test_the_header_names_the_inputs_that_were_cut_up_to_a_bound() -> None:
    made = call()
    made.report([])
    assert made.headers["x-truncated-inputs"] == "0"
    made.report([Cutting(0, 812, 256), Cutting(5, 600, 256)])
    assert made.headers["x-truncated-inputs"] == "2; 0:812>256, 5:600>256"
    made.report([Cutting(index, 9, 8) for index in range(2048)])
    assert made.headers["x-truncated-inputs"].startswith("2048; 0:9>8, ")
    assert made.headers["x-truncated-inputs"].endswith(":9>8, ...")
    assert len(made.headers["x-truncated-inputs"]) < 3600
    made.report([Cutting(5, 600, 256)], Cutting(0, 300, 256))
    assert made.headers["x-truncated-inputs"] == "2; query:300>256, 5:600>256"
