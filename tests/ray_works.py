"""What actors do in tests of the Ray runtime; importable by their names where the cluster finds this folder."""

from __future__ import annotations

from pathlib import Path

from slipstream.runtime.processes import Pipe
from slipstream.runtime.rollout_messages import TakeWeights

LIMIT_S = 120.0


def listen(pipe: Pipe) -> None:
    print("I listen", flush=True)
    while True:
        for message in pipe.hear(LIMIT_S):
            if message == "fail":
                raise RuntimeError("it failed")
            pipe.say(message)


def take_weights(pipe: Pipe, folder: Path) -> None:
    """As a rollout worker does: each version that it is told to, from what it holds."""
    from tiny_models import small_llama

    from slipstream.models.weights import fingerprint
    from slipstream.stream.receiver import Receiver

    model, receiver = small_llama(9), Receiver(folder, "blind")
    while True:
        for message in pipe.hear(LIMIT_S):
            assert isinstance(message, TakeWeights)
            version = receiver.catch_up(model, message.number)
            pipe.say((version, fingerprint(model), str(folder)))
