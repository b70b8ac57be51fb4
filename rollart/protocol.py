"""Every message on the wire between the controller and its workers.

A frame is a MessagePack array of messages (msgspec tagged unions): what a sender has to say at one time goes
together.  A message with payload frames, where its docstring names them, is alone in its frame and they follow
it.  Bulk numbers travel packed (see ``rollart.packing``).  A request carries ``seq``; its
answer carries the same ``seq`` and is either the type named in the request's docstring or ``Failure``.

Each worker holds two connections, so that control is never queued behind data: ``CONTROL`` carries the
handshake, beats and every weight and lifecycle message, ``DATA`` carries generation, environment and
training traffic.
"""

from __future__ import annotations

import contextlib
import enum
from typing import TypeVar

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "Attach",
    "Beat",
    "Cancel",
    "Close",
    "Collect",
    "ControllerBeat",
    "Done",
    "Execute",
    "Executed",
    "Export",
    "Failure",
    "FailureKind",
    "Generate",
    "Generated",
    "Goodbye",
    "Hello",
    "LoadCheckpoint",
    "Loaded",
    "Message",
    "Observation",
    "Play",
    "Played",
    "Progress",
    "PruneCheckpoints",
    "Publish",
    "Published",
    "Pull",
    "Pulled",
    "Ready",
    "Refused",
    "Release",
    "Reset",
    "Resume",
    "Role",
    "SaveCheckpoint",
    "Shutdown",
    "Step",
    "Suspend",
    "ToController",
    "ToWorker",
    "TrainGroup",
    "TrainPart",
    "TrainSample",
    "TrainStep",
    "Trained",
    "Update",
    "Updated",
    "VersionRun",
    "Welcome",
    "decode_to_controller",
    "decode_to_worker",
    "encode",
    "encode_group",
    "salvage_to_controller",
    "salvage_to_worker",
]

T = TypeVar("T")
PROTOCOL_VERSION = 5


class Role(enum.StrEnum):
    """What a worker does."""

    INFERENCE = "inference"
    TRAINER = "trainer"
    ENVIRONMENT = "environment"


class FailureKind(enum.StrEnum):
    """Why a request could not be served; decides whether it is retried."""

    INFRASTRUCTURE = "infrastructure"
    """The worker or its machine failed: the request may succeed elsewhere."""
    DETERMINISTIC = "deterministic"
    """The same request would fail again: no retry."""
    CANCELLED = "cancelled"
    """``Cancel`` reached it first."""
    LOST = "lost"
    """What it needs is gone from the store: it may succeed once that is stored anew."""
    TIMEOUT = "timeout"
    """The worker's own deadline passed."""


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class VersionRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``count`` consecutive sampled tokens that were sampled with weight ``version``."""

    version: int
    count: int


# --- the connection -------------------------------------------------------------------------------------


class Hello(Message):
    """Worker → controller, first on CONTROL.  Answer: ``Welcome`` or ``Refused``."""

    protocol: int
    role: Role
    name: str
    pid: int
    hardware_class: str
    packages: dict[str, str]
    """Versions of the packages that do this role's work."""


class Attach(Message):
    """Worker → controller, first on DATA: this connection belongs to worker ``name``."""

    name: str


class Welcome(Message):
    """Controller → worker: accepted.  ``config`` is the run's resolved ``Config`` as MessagePack."""

    config: bytes
    run_dir: str
    model_dir: str
    store_dir: str
    """Folder in this machine's shared memory for weights: the local store, or what is pulled from another."""
    store_master: str
    """HOST:PORT of the Mooncake master, where weights travel through one."""
    store_run: str
    """What keeps this run's weights apart in a store that others use too."""
    heartbeat_s: float
    controller_timeout_s: float


class Refused(Message):
    """Controller → worker: not accepted, and why.  The worker ends."""

    reason: str


class Ready(Message):
    """Worker → controller: set up and able to serve.  ``facts`` is shown to people and logged."""

    capacity: int
    """Requests the worker serves at once."""
    facts: dict[str, str]
    tasks: list[str] = []
    """The tasks that an environment worker holds episodes of; empty: all."""


class Beat(Message):
    """Worker → controller, every ``heartbeat_s``."""

    busy: int
    """Requests being served."""
    refused_frames: int
    """Frames that did not decode, since the start."""


class ControllerBeat(Message):
    """Controller → worker, every ``heartbeat_s``."""


class Shutdown(Message):
    """Controller → worker: finish now and exit 0."""

    reason: str


class Goodbye(Message):
    """Worker → controller: last message before the exit."""

    reason: str


class Cancel(Message):
    """Controller → worker: stop serving request ``seq``; it is answered by a ``Failure(CANCELLED)``."""

    seq: int


class Done(Message):
    """Answer to a request with nothing to say but that it was carried out."""

    seq: int


class Failure(Message):
    """Answer to a request that could not be served."""

    seq: int
    kind: FailureKind
    message: str


# --- inference ------------------------------------------------------------------------------------------


class Generate(Message):
    """Sample a continuation of ``prompt``.  Answer: ``Generated``."""

    seq: int
    request_id: str
    prompt: bytes
    """int32 token ids."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    allowed_token_ids: bytes
    """int32 ids that may be sampled; empty: all."""
    stop_token_ids: bytes
    ignore_eos: bool
    seed: int | None
    prefill: bool = False
    """Compute the prompt for another worker to decode: one token is sampled, and ``Generated.kv`` says where the
    keys and values are."""
    kv: bytes = b""
    """Of the worker that prefilled the prompt: where its keys and values are.  They are fetched, not computed."""
    kv_version: int = -1
    """The version that computed them; a worker that serves another one refuses with ``Failure(LOST)``."""


class Generated(Message):
    """What the engine sampled; ``sum(run.count for run in versions) == tokens`` always holds."""

    seq: int
    ids: bytes
    """int32."""
    logprobs: bytes
    """float32, one per id, of the distribution that was sampled; empty for a greedy request."""
    versions: list[VersionRun]
    finish_reason: str
    """``stop`` or ``length``."""
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache, or from the worker that prefilled them."""
    kv: bytes = b""
    """Answer to a ``prefill``: MessagePack of the engine's own words, for the engine that decodes."""


class Progress(Message):
    """Worker → controller: what request ``seq`` has sampled since the last ``Progress`` of it; it goes on."""

    seq: int
    ids: bytes
    logprobs: bytes
    versions: list[VersionRun]


class Release(Message):
    """Controller → worker: nobody will fetch the keys and values at ``kv``; tell the worker that holds them."""

    kv: bytes


class Suspend(Message):
    """Stop scheduling generation, keep requests in flight.  Answer ``Done`` once the engine is still."""

    seq: int


class Pull(Message):
    """Bring version ``version`` to this host and check it, in the background.  Answer: ``Pulled``."""

    seq: int
    version: int
    manifest: str
    """The version's reference, as ``Published`` has it."""


class Pulled(Message):
    """A version is in this host's memory, and its bytes are right."""

    seq: int
    size_bytes: int
    moved_bytes: int = 0
    """Of them, what came from elsewhere: nothing on the trainer's own machine, less than all where little changed."""
    refetched: int = 0
    """Buckets that came twice, since their bytes were wrong the first time."""


class Update(Message):
    """Load pulled weights into the suspended engine, and score the canary prompt.  Answer: ``Updated``.

    The engine runs again when the answer is sent, but finished generations are held back until ``Resume``:
    the controller compares the canary first.
    """

    seq: int
    version: int
    canary: bytes
    """int32 ids to score."""


class Updated(Message):
    """The engine serves ``version``, by its own word."""

    seq: int
    version: int
    canary_logprobs: bytes
    """float32, for ids 1… of the canary prompt, each given the ids before it, at temperature 1, no mask."""
    load_s: float


class Resume(Message):
    """Release held generations.  Answer: ``Done``."""

    seq: int


# --- environments ---------------------------------------------------------------------------------------


class Reset(Message):
    """Begin an episode under the name ``session``.  Answer: ``Observation``."""

    seq: int
    session: str
    task: str
    """The task's name in the config."""
    seed: int
    split: str
    """``train`` or ``eval``; an environment keeps the two disjoint."""


class Step(Message):
    """Act in episode ``session``.  Answer: ``Observation``."""

    seq: int
    session: str
    action: bytes
    """int32 ids the policy sampled."""


class Close(Message):
    """Drop episode ``session``; no answer, unknown sessions are ignored."""

    session: str


class Observation(Message):
    """What the environment answered, rendered to token ids by the worker."""

    seq: int
    ids: bytes
    """int32 ids that follow what the policy has seen so far."""
    reward: float
    """Of this step; 0 at reset."""
    done: bool
    info: dict[str, float]
    text: str = ""
    """What ``ids`` were rendered from; here and below only where the task has a ``reward`` in the config."""
    answer: str = ""
    """The text of the action; empty at reset."""
    reference: str = ""
    """The environment's ``reference``, as it is now."""


class Play(Message):
    """Let a task's agent play a whole episode under the name ``session``, its calls going to ``base_url``.

    Answer: ``Played``, when the agent has ended.  ``Close`` and ``Cancel`` end it sooner.
    """

    seq: int
    session: str
    task: str
    seed: int
    split: str
    base_url: str
    api_key: str
    """Names this attempt of the trajectory at the endpoint, and no other."""
    model: str


class Played(Message):
    """The agent ended by itself, and how it scored."""

    seq: int
    reward: float
    info: dict[str, float]


# --- training -------------------------------------------------------------------------------------------


class TrainSample(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One scored trajectory of T tokens, S of them sampled.

    An agent's trajectory whose conversations branched is several samples with one ``trajectory`` number, next to
    one another; they share its reward and count once in the group's baseline.
    """

    trajectory: int
    ids: bytes
    """int32[T]."""
    mask: bytes
    """uint8[T]: 1 where the engine sampled the token, else 0."""
    logprobs: bytes
    """float32[S], the behaviour policy's."""
    versions: list[VersionRun]
    """Runs over the S sampled tokens, in order."""
    reward: float
    turn_tokens: bytes = b""
    """int32[K], one a turn: how many of the S were sampled in it; empty: as the mask's runs say."""
    turn_rewards: bytes = b""
    """float32[K]: what the environment gave for each turn; what ``reward`` has beyond them came with the last."""
    truncated: bool = False
    """It was cut, and scored as it was."""


class TrainGroup(msgspec.Struct, array_like=True, frozen=True):
    """The samples of one task instance, which share a baseline."""

    group: int
    task: str
    samples: list[TrainSample]


class TrainPart(Message):
    """Groups of the batch of step ``step_id``, ahead of its ``TrainStep``; to say it again changes nothing.

    Payload: one frame per group, an encoded ``TrainGroup``.  Answer: ``Done``, which invites the next part.
    """

    seq: int
    step_id: int
    first: int
    """How many of the batch's groups come before these."""


class TrainStep(Message):
    """Train on the batch whose groups the ``TrainPart`` of this step brought.  Answer: ``Trained``.

    Idempotent: a ``step_id`` that was applied already is answered from memory.
    """

    seq: int
    step_id: int
    groups: int
    """How many the batch has."""
    version: int
    """The trainer's version before the step."""
    verify_share: float
    """Share of the trajectories whose log-probabilities are recomputed under the weights that sampled them."""


class Trained(Message):
    """The step is applied (``version`` is one higher), or skipped (``version`` unchanged, ``skipped`` says why)."""

    seq: int
    step_id: int
    version: int
    skipped: str
    metrics: dict[str, float]


class Publish(Message):
    """Put the current weights into the store as ``version``.  Answer: ``Published``.  Idempotent by its attempt."""

    seq: int
    version: int
    attempt: int
    """From 0; a higher one stores the version anew, after a part of it was lost."""
    canary: bytes
    """int32 ids that the trainer scores with these weights."""


class Published(Message):
    """Version ``version`` is in the store, whole."""

    seq: int
    version: int
    manifest: str
    """The version's reference in the store."""
    canary_logprobs: bytes
    """float32, as in ``Updated``."""
    size_bytes: int
    blocked_s: float
    """Seconds that the publishing kept the trainer from computing."""


class Collect(Message):
    """Remove every version below ``below`` from the store.  Answer: ``Done``."""

    seq: int
    below: int


class SaveCheckpoint(Message):
    """Write a checkpoint into ``path``, atomically; what was left there of another state is replaced.

    It has the state of when the request came: later requests are served while it is written.  Answer: ``Done``, when
    it is durably there.
    """

    seq: int
    path: str
    score: float | None = None
    """How good the weights are, as far as it is known."""


class PruneCheckpoints(Message):
    """Remove the oldest checkpoints beside ``path``: nothing needs them, for it is known that ``path`` is there.

    The names of checkpoints in a folder sort by age.  Answer: ``Done``.
    """

    seq: int
    path: str
    keep: int
    """Of those up to this one, so many stay; newer ones are left alone."""
    keep_best: bool = False
    """Besides them the one with the highest score stays."""


class Export(Message):
    """Write the current weights as a Hugging Face folder into ``path``, atomically.  Answer: ``Done``."""

    seq: int
    path: str


class LoadCheckpoint(Message):
    """Go on from the checkpoint ``path``.  Answer: ``Loaded``."""

    seq: int
    path: str


class Loaded(Message):
    """The trainer is at ``version``."""

    seq: int
    version: int


# --- methods that a script declares ---------------------------------------------------------------------


class Execute(Message):
    """Call ``method`` of the declared worker class at ``path`` (module:Class).  Answer: ``Executed``."""

    seq: int
    path: str
    method: str
    arguments: bytes
    """MessagePack of [positional, keyword]."""


class Executed(Message):
    """What the method returned, as MessagePack."""

    seq: int
    result: bytes


ToWorker = (
    Welcome
    | Refused
    | ControllerBeat
    | Shutdown
    | Cancel
    | Generate
    | Suspend
    | Pull
    | Update
    | Resume
    | Reset
    | Step
    | Close
    | TrainPart
    | TrainStep
    | Publish
    | Collect
    | SaveCheckpoint
    | PruneCheckpoints
    | Export
    | Release
    | Execute
    | Play
    | LoadCheckpoint
)
ToController = (
    Hello
    | Attach
    | Ready
    | Beat
    | Goodbye
    | Done
    | Failure
    | Generated
    | Updated
    | Pulled
    | Observation
    | Trained
    | Published
    | Progress
    | Executed
    | Played
    | Loaded
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
_to_controller: msgspec.msgpack.Decoder[list[ToController]] = msgspec.msgpack.Decoder(list[ToController])
_one_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_one_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_parts: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode(*messages: Message) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def encode_group(group: TrainGroup) -> bytes:
    """A payload frame of ``TrainPart``."""
    return _encoder.encode(group)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    """The messages in ``frame``; ``msgspec.DecodeError`` when one of them is none."""
    return _to_worker.decode(frame)


def decode_to_controller(frame: bytes) -> list[ToController]:
    """The messages in ``frame``; ``msgspec.DecodeError`` when one of them is none."""
    return _to_controller.decode(frame)


def salvage_to_worker(frame: bytes) -> list[ToWorker]:
    """Of a frame that did not decode: the messages in it that do.  What one has wrong costs no other its place."""
    return _salvage(frame, _one_to_worker)


def salvage_to_controller(frame: bytes) -> list[ToController]:
    """As ``salvage_to_worker``, of the other direction."""
    return _salvage(frame, _one_to_controller)


def _salvage(frame: bytes, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
    found: list[T] = []
    with contextlib.suppress(msgspec.DecodeError):
        for part in _parts.decode(frame):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(decoder.decode(part))
    return found
