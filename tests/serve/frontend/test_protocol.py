"""The protocol without a network: bodies into requests and answers into bodies, with equal results from the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fuzz import binary, text
from hypothesis import given
from hypothesis import strategies as st

from hotrow.serve.protocol.backend import ModelInfo
from hotrow.serve.protocol.inference_json import Output, RequestOptions, RequestParser, write_answer
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.predictions import sigmoid
from hotrow.serve.protocol.request import Answer, Ids, PackedIds, RefusedError, Request, Signature

INFO = ModelInfo("ctr", "1", Signature(("a", "b", "c"), frozenset(), 2))


def new_parser() -> RequestParser:
    return RequestParser(INFO, Limits())


def columns(request: Request) -> list[list[int]]:
    return [ids.values.tolist() for ids in features(request)]


def features(request: Request) -> Sequence[Ids]:
    return request.ids if request.matrix is None else PackedIds(np.ascontiguousarray(request.matrix.T))


@given(rows=st.integers(1, 40), order=st.permutations(["a", "b", "c", "dense"]), seed=st.integers(0, 1000))
def test_every_form_and_order_gives_the_same_columns(rows: int, order: list[str], seed: int) -> None:
    draw = np.random.default_rng(seed)
    keys = draw.integers(-(2**63), 2**63 - 1, (rows, 3))
    dense = draw.normal(size=(rows, 2)).astype(np.float32)
    own = {"a": keys[:, 0].copy(), "b": keys[:, 1].copy(), "c": keys[:, 2].copy(), "dense": dense}
    own = {name: own[name] for name in order}
    parser = new_parser()
    bodies = [binary(own), binary({"dense": dense, "keys": keys}), (text(own), None), binary(own)]
    for body, header in bodies:  # the last header is repeated, so it is read from the cache
        request, _ = parser.parse(body, header, None)
        assert columns(request) == keys.T.tolist() and request.rows == rows
        assert request.dense is not None and np.array_equal(request.dense, dense)
        assert all(ids.values.flags.aligned and ids.offsets is None for ids in features(request))


def test_requests_with_one_id_per_row_come_as_one_matrix() -> None:
    own = {name: np.arange(4) for name in "abc"} | {"dense": np.zeros((4, 2), np.float32)}
    request, _ = new_parser().parse(*binary(own), None)
    assert isinstance(request.ids, PackedIds) and request.ids.matrix.shape == (3, 4)
    assert request.ids.matrix.flags.c_contiguous and len(request.ids) == 3


def test_a_cached_header_still_checks_every_request_s_data() -> None:
    parser = new_parser()
    good, header = binary({"keys": np.zeros((2, 3), np.int64), "dense": np.zeros((2, 2), np.float32)})
    parser.parse(good, header, None)
    invalid = good[:-4] + np.float32(np.nan).tobytes()
    with pytest.raises(RefusedError, match="row 1, column 1"):
        parser.parse(invalid, header, None)
    with pytest.raises(RefusedError, match="add up to"):
        parser.parse(good[:-4], header, None)


def test_large_but_finite_dense_features_are_taken() -> None:
    dense = np.full((4, 2), 3e38, np.float32)
    with np.errstate(over="ignore"):
        request, _ = new_parser().parse(*binary({"keys": np.zeros((4, 3), np.int64), "dense": dense}), None)
    assert request.dense is not None and np.array_equal(request.dense, dense)


def test_cached_headers_are_bounded_and_those_with_an_id_are_not_cached() -> None:
    parser = new_parser()
    for rows in range(1, 1200):
        parser.parse(*binary({"keys": np.zeros((rows, 3), np.int64), "dense": np.zeros((1, 2), np.float32)}), None)
    assert 0 < len(parser._parsed_headers) <= 512
    before = len(parser._parsed_headers)
    parser.parse(text({"keys": np.zeros((1, 3), np.int64), "dense": np.zeros((1, 2), np.float32)}), None, None)
    assert len(parser._parsed_headers) == before


def test_probabilities_are_torchs_to_rounding_from_end_to_end() -> None:
    logits = np.concatenate([np.linspace(-87, 87, 5001), [-1e30, -200, -88, 88, 200, 1e30]]).astype(np.float32)
    want = torch.sigmoid(torch.from_numpy(logits)).numpy()
    np.testing.assert_allclose(sigmoid(logits), want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("parameters", [{}, {"freshness": 1.5, "note": 'a "b"'}])
@pytest.mark.parametrize("name", [None, 'x"\\\n'])
def test_answers_are_json_whatever_they_hold(parameters: dict[str, str | int | float], name: str | None) -> None:
    answer = Answer(np.zeros((2, 3), np.float32), 'm"', "1", 9, 2, True, parameters)
    body, header = write_answer(
        answer, RequestOptions(id=name, outputs=(Output("logits", True), Output("probabilities", False)))
    )
    document = json.loads(body[:header])
    assert document["model_name"] == 'm"' and document.get("id") == name
    assert document["parameters"] == {"publication": 9, "late_rows": 2, "compiled": True, **parameters}
    assert document["outputs"][0] == {
        "name": "logits", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24},
    }  # fmt: skip
    assert document["outputs"][1]["data"] == [0.5] * 6 and len(body) - (header or 0) == 24
