"""Triton's side of the toolkit: a thin proxy between Triton requests and the engine process.

It runs in Triton's Python stub: the standard library, numpy and ``triton_python_backend_utils`` are all there is. It
parses tensors into plain lists, passes them on, and turns the engine's deltas into responses. What the values mean,
and whether they are allowed, is decided in the engine process.

Threads: Triton calls ``execute``, which only queues; the engine keeper receives deltas and only queues; one sender
thread makes every call to ``send`` and ``is_cancelled`` (each is a round trip to the server process, and responses of
one request must keep their order with FINAL last).
"""

import contextlib
import itertools
import json
import queue
import threading
import time

import numpy as np
import triton_python_backend_utils as pb
import wire
from engine_link import EngineDown, EngineLink
from metric_publisher import MetricPublisher

# Each look is a call into the server: at 16 streams, five a second each take about one percent of a core.
CANCEL_POLL_S = 0.2
# Names in pb.TritonError, which the stub only fills in after it has imported this file.
_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",  # 24.10 has no word of its own for it; the text has
    "INTERNAL": "INTERNAL",
}
PUBLISH_S = 2.0
# The engine keeps deadlines itself; ours are for one that hangs or is not there, so it comes first.
DEADLINE_SLACK_S = 0.1


class Active:
    """A request between its arrival and its final response."""

    def __init__(self, identity, client_id, fields, sender, stream):
        self.id = identity
        self.client_id = client_id
        self.fields = fields
        self.sender = sender
        self.stream = stream
        self.arrived = self.polled = time.monotonic()
        self.deadline_s = deadline_of(fields)
        self.life = None  # which engine process has it
        self.done = False
        self.held = None  # output not yet sent: everything for stream=false, else only within one sender round
        self.log_prob_sum = None


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        self.max_queue = int(parameters["max_queue"])
        self.restart_wait_s = float(parameters["restart_wait_s"])
        self.ids = itertools.count(1)
        self.lock = threading.Lock()
        self.pass_on_lock = threading.Lock()
        self.active = {}
        self.events = queue.SimpleQueue()
        self.draining = False
        self.mean_request_s = 1.0
        self.publisher = MetricPublisher(pb, args["model_name"])
        self.link = EngineLink(
            json.loads(parameters["engine_command"]),
            on_message=self._from_engine,
            on_ready=self._engine_ready,
            on_lost=self._engine_lost,
            log=pb.Logger.log_warn,
            start_timeout_s=float(parameters["start_timeout_s"]),
            heartbeat_timeout_s=float(parameters["heartbeat_timeout_s"]),
            stall_timeout_s=float(parameters["stall_timeout_s"]),
        )
        try:
            self.link.start()
        except EngineDown as error:
            raise pb.TritonModelException(str(error)) from error
        self.sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self.sender.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Refused as error:
                self._queue_error(Active("", "", {}, sender, False), error.code, str(error))
            except Exception as error:
                pb.Logger.log_error(f"request could not be read: {error!r}")
                self._queue_error(Active("", "", {}, sender, False), "INTERNAL", "the request could not be read")
        return None

    def finalize(self):
        # Triton calls this after the last response; what is still here lost its engine in the meantime.
        self.link.close()
        for active in self._take_all():
            self._queue_error(active, "UNAVAILABLE", "the model is being unloaded")
        self.events.put(None)
        self.sender.join(timeout=10.0)

    # ---- requests in (Triton's thread)

    def _accept(self, request, sender):
        fields = read_fields(request)
        control = fields.pop("control", [None])[0]
        client_id = request.request_id()
        if control is not None:
            if control not in ("health", "metrics", "drain", "abort"):
                raise Refused("INVALID_ARGUMENT", f"control: got {control!r}, expected health, metrics, drain or abort")
            if control in ("drain", "abort"):
                self._drain(abort=control == "abort")
            self.events.put((Active("", "", {}, sender, False), self._health(with_samples=control == "metrics")))
            return
        if fields.pop("stop", [False])[0] is True:
            self._stop_by_client_id(client_id, sender)
            return
        stream = fields.get("stream", fields.get("streaming", [False]))[0] is True
        active = Active(str(next(self.ids)), client_id, fields, sender, stream)
        if self.draining:
            raise Refused("UNAVAILABLE", "the server is shutting down")
        with self.lock:
            slots = self.link.limits["max_batch_size"]
            waiting = len(self.active) - slots
            if waiting >= self.max_queue:
                # When one of the waiting requests will have left, at the pace of the last requests.
                retry_after_s = min(max(self.mean_request_s / slots, 1.0), 60.0)
                raise Refused(
                    "UNAVAILABLE",
                    f"queue: got {waiting} waiting requests, expected fewer than max_queue={self.max_queue}"
                    f"; try again in {retry_after_s:.0f} s",
                )
            self.active[active.id] = active
        self._pass_on(active)

    def _pass_on(self, active):
        """Send to the engine; while it restarts, leave the request for ``_engine_ready`` or the sender's deadline."""
        try:
            # Sending and noting who has it are one step: a request is in flight at exactly one engine process.
            with self.pass_on_lock:
                if active.life is None or active.life != self.link.life:
                    active.life = self.link.send(wire.Generate(active.id, active.fields, active.client_id))
        except EngineDown:
            active.life = None
        except wire.WireError as error:
            if self._take(active.id):
                self._queue_error(active, "INVALID_ARGUMENT", f"request: {error}")

    def _drain(self, *, abort):
        """Take no new requests; with ``abort`` also end the ones in flight, each with an error."""
        self.draining = True
        if abort:
            for active in self._take_all():
                self._cancel_in_engine(active.id)
                self._queue_error(active, "UNAVAILABLE", "the server is shutting down")

    def _stop_by_client_id(self, client_id, sender):
        if not client_id:
            raise Refused(
                "INVALID_ARGUMENT", "stop: got true without a request id, expected the id of the request to stop"
            )
        with self.lock:
            targets = [active.id for active in self.active.values() if active.client_id == client_id]
        for identity in targets:
            self._cancel_in_engine(identity)
        self.events.put((Active("", "", {}, sender, False), ""))

    def _cancel_in_engine(self, identity):
        with contextlib.suppress(EngineDown):  # then _engine_lost ends its requests
            self.link.send(wire.Cancel(identity))

    def _health(self, *, with_samples):
        facts = self.link.facts()
        facts["in_flight"] = len(self.active)
        facts["limits"] = self.link.limits
        facts["max_queue"] = self.max_queue
        if with_samples:
            facts["samples"] = self.link.samples
        facts["error"] = without_detail(facts["error"]) if facts["error"] else None
        return json.dumps(facts)

    # ---- the engine's messages (keeper thread)

    def _from_engine(self, message):
        if isinstance(message, wire.Delta):
            active = self.active.get(message.id) if message.finish_reason is None else self._take(message.id)
            if active:
                self.events.put((active, message))
        elif isinstance(message, wire.Failed):
            active = self._take(message.id)
            if active:
                self._queue_error(active, message.code, message.message)

    def _engine_ready(self):
        with self.lock:
            waiting = [active for active in self.active.values() if active.life != self.link.life]
        for active in waiting:
            self._pass_on(active)

    def _engine_lost(self, life, reason):
        with self.lock:
            lost = [active for active in self.active.values() if active.life == life]
            for active in lost:
                del self.active[active.id]
        for active in lost:
            self._queue_error(
                active, "UNAVAILABLE", f"{without_detail(reason)} while it ran this request; send it again"
            )

    def _take(self, identity):
        with self.lock:
            return self.active.pop(identity, None)

    def _take_all(self):
        with self.lock:
            everything, self.active = list(self.active.values()), {}
        return everything

    # ---- responses out (sender thread only)

    def _queue_error(self, active, code, message):
        self.events.put((active, Refused(code, message)))

    def _send_loop(self):
        ended, published_at = False, 0.0
        while not ended:
            batch = []
            try:
                batch.append(self.events.get(timeout=CANCEL_POLL_S / 2))
                while True:
                    batch.append(self.events.get_nowait())
            except queue.Empty:
                pass
            ended = None in batch
            touched = {}
            for active, event in (item for item in batch if item is not None):
                touched[id(active)] = active
                merge(active, event)
            for active in touched.values():
                self._guarded(self._flush, active)
            now = time.monotonic()
            with self.lock:
                due = [active for active in self.active.values() if now - active.polled >= CANCEL_POLL_S]
            for active in due:
                self._guarded(self._poll, active, now)
            if now - published_at >= PUBLISH_S:
                published_at = now
                self._publish()

    def _publish(self):
        try:
            self.publisher.publish(self.link.samples, restarts=self.link.restarts, ready=self.link.state == "ready")
        except Exception as error:
            pb.Logger.log_error(f"metrics could not be published: {error!r}")

    def _guarded(self, action, active, *arguments):
        # An exception must not end this thread: every stream of the server would stop silently.
        try:
            action(active, *arguments)
        except Exception as error:
            active.done = True
            pb.Logger.log_error(f"response of request {active.id} could not be sent: {error!r}")
            if self._take(active.id):
                self._cancel_in_engine(active.id)

    def _flush(self, active):
        held = active.held
        if active.done or held is None or not (active.stream or held.last):
            return
        active.held = None
        active.done = held.last
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if held.last else 0
        if held.error:
            error = pb.TritonError(f"{held.error.code}: {held.error}", getattr(pb.TritonError, _CODES[held.error.code]))
            active.sender.send(pb.InferenceResponse(error=error), flags=flags)
        else:
            if held.log_probs:
                active.log_prob_sum = (active.log_prob_sum or 0.0) + sum(held.log_probs)
            active.sender.send(pb.InferenceResponse(held.tensors(active.log_prob_sum)), flags=flags)
            if held.end:
                self.mean_request_s += 0.1 * (time.monotonic() - active.arrived - self.mean_request_s)

    def _poll(self, active, now):
        active.polled = now
        if active.sender.is_cancelled():
            if self._take(active.id):
                self._cancel_in_engine(active.id)
                active.held = Held(error=Refused("CANCELLED", "the client closed the connection"))
                self._flush(active)
        elif active.deadline_s is not None and now - active.arrived > active.deadline_s + DEADLINE_SLACK_S:
            self._expire(active)
        elif active.life is None and now - active.arrived > self.restart_wait_s and self._take(active.id):
            reason = without_detail(self.link.last_error or "the engine is starting")
            text = f"the engine is restarting ({reason}); this request waited {self.restart_wait_s:g} s"
            active.held = Held(error=Refused("UNAVAILABLE", f"{text}, try again"))
            self._flush(active)

    def _expire(self, active):
        if self._take(active.id):
            self._cancel_in_engine(active.id)
            text = f"the request was not finished within its deadline_s = {active.deadline_s:g}"
            active.held = Held(error=Refused("DEADLINE_EXCEEDED", text))
            self._flush(active)


class Refused(Exception):
    """A request ends in an error. ``code``: a status word."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Held:
    """Output of one request that goes into one response."""

    def __init__(self, text="", error=None, control=False):
        self.texts, self.token_ids, self.log_probs, self.log_prob_details = [text], [], [], []
        self.end = None
        self.error = error
        self.control = control

    @property
    def last(self):
        return self.error is not None or self.control or self.end is not None

    def tensors(self, log_prob_sum):
        tensors = [text_tensor("text_output", "".join(self.texts))]
        if self.control:
            return tensors
        tensors.append(pb.Tensor("token_ids", np.array([self.token_ids], dtype=np.int32)))
        if self.log_probs:
            tensors.append(pb.Tensor("output_log_probs", np.array([self.log_probs], dtype=np.float32)))
        if self.log_prob_details:
            tensors.append(text_tensor("log_prob_details", json.dumps(self.log_prob_details, ensure_ascii=False)))
        if self.end:
            metrics = self.end.metrics
            drafted, accepted = metrics.get("drafted_tokens", 0), metrics.get("accepted_tokens", 0)
            rate = accepted / drafted if drafted else 0.0
            tensors += [
                text_tensor("finish_reason", self.end.finish_reason),
                pb.Tensor("acceptance_rate", np.array([[rate]], dtype=np.float32)),
                pb.Tensor("total_accepted_draft_tokens", np.array([[accepted]], dtype=np.int32)),
                pb.Tensor("total_draft_tokens", np.array([[drafted]], dtype=np.int32)),
                text_tensor("request_metrics", json.dumps(metrics)),
            ]
            if log_prob_sum is not None:
                tensors.append(pb.Tensor("cum_log_probs", np.array([[log_prob_sum]], dtype=np.float32)))
        return tensors


def text_tensor(name, text):
    return pb.Tensor(name, np.array([[text.encode(errors="replace")]], dtype=np.object_))


def merge(active, event):
    """Add an event (a delta, an error, or the text of a control answer) to what the request will send next."""
    if isinstance(event, Refused):
        active.held = Held(error=event)
    elif isinstance(event, str):
        active.held = Held(text=event, control=True)
    else:
        held = active.held = active.held or Held()
        held.texts.append(event.text)
        held.token_ids += event.token_ids
        held.log_probs += event.log_probs
        held.log_prob_details += event.log_prob_details
        if event.finish_reason is not None:
            held.end = event


def read_fields(request):
    """Inputs and parameters of a Triton request: name → flat list of bool, int, float or str."""
    fields = {}
    for tensor in request.inputs():
        array = tensor.as_numpy().reshape(-1)
        if array.dtype == np.object_:
            try:
                fields[tensor.name()] = [value.decode() for value in array.tolist()]
            except UnicodeDecodeError as error:
                raise Refused("INVALID_ARGUMENT", f"{tensor.name()}: got bytes that are not UTF-8: {error}") from error
        elif array.dtype == np.float32:
            # The shortest decimal that means this float32: 0.7 stays 0.7, as the client wrote it.
            fields[tensor.name()] = [float(str(value)) for value in array]
        else:
            fields[tensor.name()] = array.tolist()
    for name, value in json.loads(request.parameters() or "{}").items():
        if name != "id" and not name.startswith("triton_"):  # "id" of generate's JSON is request_id() already
            fields.setdefault(name, [value])
    return fields


def deadline_of(fields):
    """The request's ``deadline_s``, or None; what is no such number is left to the engine to refuse."""
    value = fields.get("deadline_s", [None])[:1]
    return float(value[0]) if value and type(value[0]) in (int, float) and value[0] > 0 else None


def without_detail(reason):
    """A load error may name files of the server; requests only learn its first words."""
    return reason.split(":", 1)[0]
