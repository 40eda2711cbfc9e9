"""Client: predictions and lookups from a server, as numpy arrays.

A request that fails for a while (429, 503, or no connection: the server starts, restarts or is overloaded) is sent
again until `timeout` is spent, after the pause that the server asks for (Retry-After) or pauses that double.
Every other error is raised at once. Requests change nothing on the server, so sending one again is safe.

Any thread may use one Client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from hotrow.backoff import Backoff
from hotrow.client.answer import Answer, ClientError
from hotrow.client.http_calls import HttpCalls
from hotrow.client.tensors import InferCall, tensors
from hotrow.errors import OptionError, choices

EMBEDDINGS = "embeddings."
POLICIES = ("wait", "initial", "default")
SCHEMES = ("http", "https", "grpc", "grpcs")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds

_T = TypeVar("_T")


class Calls(Protocol):
    """What a transport does. Each call is one attempt and raises ClientError."""

    def metadata(self, model: str, version: str | None, timeout: float) -> dict[str, Any]: ...

    def infer(self, call: InferCall, outputs: Sequence[str], timeout: float) -> Answer: ...

    def close(self) -> None: ...


class Client:
    """A server's models, at "http://host:port" or, with grpcio installed, "grpc://host:port" (TLS: https, grpcs).

    `timeout` is how many seconds a call takes at most, with all its attempts. `headers` go with every request, as a
    proxy in front of the server may ask.

    >>> Client("127.0.0.1:8000")
    Traceback (most recent call last):
    hotrow.errors.OptionError: address='127.0.0.1:8000'; give http://host:port or grpc://host:port
    """

    def __init__(self, address: str, *, timeout: float = 10.0, headers: Mapping[str, str] | None = None) -> None:
        scheme, separator, rest = address.partition("://")
        if not separator or not rest or scheme not in SCHEMES:
            raise OptionError(f"address={address!r}; give http://host:port or grpc://host:port")
        if not timeout > 0:
            raise OptionError(f"timeout={timeout!r}; give seconds above 0")
        self.address, self.timeout = address, timeout
        self._calls: Calls = _open(scheme, address, headers or {})
        self._outputs: dict[tuple[str, str | None], list[str]] = {}  # embedding outputs by model and version

    def embeddings(
        self,
        model: str,
        inputs: Mapping[str, Any],
        features: Sequence[str] | None = None,
        *,
        half: bool = False,
        raw: bool = False,
        version: str | int | None = None,
        policy: str | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """The looked-up vectors of the inputs' rows, as `Engine.lookup` gives them.

        `inputs` are keys by feature, `keys`, or with `raw` (or any strings) columns for the feature spec. `features`
        are those whose vectors are wanted: by default those that have an input of their own, or all if none has. Other
        features need no input. `half` asks for float16. `policy` and `deadline` (seconds) decide what a row that is not
        in memory in time reads as; by default as the server was told.
        """
        call, until = _call(model, version, inputs, raw, policy, deadline, half), time.monotonic() + self.timeout
        known = self._outputs.get(call[:2])
        try:
            answer = self._infer(call, self._embedding_outputs(call, inputs, features, until), until)
        except (ClientError, OptionError) as error:
            if known is None or (isinstance(error, ClientError) and error.status != 400):
                raise
            self._outputs.pop(call[:2], None)  # a new version may have other features
            outputs = self._embedding_outputs(call, inputs, features, until)
            if self._outputs[call[:2]] == known:
                raise
            answer = self._infer(call, outputs, until)
        arrays = {name.removeprefix(EMBEDDINGS): found for name, found in answer.arrays.items()}
        return Answer(arrays, answer.model, answer.version, answer.parameters)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        raw: bool = False,
        version: str | int | None = None,
        policy: str | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """The `probabilities` and `logits` of the inputs' rows, [rows] or [rows, tasks].

        A model with a regression or a count has `predictions` instead of `probabilities` (docs/tasks.md). Every input
        of the model is needed; options are those of `embeddings`.
        """
        call = _call(model, version, inputs, raw, policy, deadline)
        return self._infer(call, [], time.monotonic() + self.timeout)

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _embedding_outputs(
        self, call: InferCall, inputs: Mapping[str, Any], features: Sequence[str] | None, until: float
    ) -> list[str]:
        """The names of the outputs of these features, masks too."""
        known = self._outputs.get(call[:2])
        if known is None:
            document = self._retry(lambda left: self._calls.metadata(call.model, call.version, left), until)
            names = [str(output["name"]) for output in document["outputs"]]
            known = self._outputs[call[:2]] = [name for name in names if name.startswith(EMBEDDINGS)]
        masks = {f"{name}_mask" for name in known} & set(known)
        every = [name.removeprefix(EMBEDDINGS) for name in known if name not in masks]
        if features is None:
            features = [name for name in every if name in inputs] or every
        for name in features:
            if name not in every:
                raise OptionError(f"features: model {call.model!r} has no feature {name!r}; {choices(name, every)}")
        if not features:
            raise OptionError(f"features=[]: name one or more, or leave it out; model {call.model!r} has {every}")
        wanted = [f"{EMBEDDINGS}{name}{suffix}" for name in features for suffix in ("", "_mask")]
        return [name for name in wanted if name in known]

    def _infer(self, call: InferCall, outputs: Sequence[str], until: float) -> Answer:
        return self._retry(lambda left: self._calls.infer(call, outputs, left), until)

    def _retry(self, call: Callable[[float], _T], until: float) -> _T:
        """Call until it succeeds, fails for good, or the time is up. It gets the seconds that are left."""
        pauses, tries = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5), 0
        while True:
            tries += 1
            try:
                return call(max(0.001, until - time.monotonic()))
            except ClientError as error:
                pause = pauses.next() if error.retry_after is None else error.retry_after
                if not error.temporary:
                    raise
                if time.monotonic() + pause >= until:
                    why = f"{error} ({tries} tries in timeout={self.timeout:g} s; a longer timeout tries longer)"
                    raise ClientError(why, error.status, error.retry_after) from error
            time.sleep(pause)


def _call(
    model: str,
    version: str | int | None,
    inputs: Mapping[str, Any],
    raw: bool,
    policy: str | None,
    deadline: float | None,
    half: bool = False,
) -> InferCall:
    if policy is not None and policy not in POLICIES:
        raise OptionError(f"policy={policy!r}; {choices(policy, POLICIES)}")
    if deadline is not None and not deadline > 0:
        raise OptionError(f"deadline={deadline!r}; give seconds above 0")
    given = {
        "raw": raw or None,
        "policy": policy,
        "deadline_ms": None if deadline is None else float(deadline * 1000),
        "embeddings_datatype": "FP16" if half else None,
    }
    parameters = {name: value for name, value in given.items() if value is not None}
    return InferCall(model, None if version is None else str(version), tensors(inputs), parameters)


def _open(scheme: str, address: str, headers: Mapping[str, str]) -> Calls:
    if scheme in ("http", "https"):
        return HttpCalls(address, headers)
    try:
        from hotrow.client.grpc_calls import GrpcCalls
    except ModuleNotFoundError as error:
        raise OptionError(f"address={address!r} needs grpcio: pip install 'hotrow[serve]', or use http://") from error
    return GrpcCalls(address, headers)
