"""Checkpoints of sharded actors: taken asleep, resumed with other numbers of ranks, whole whenever a run is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded import ODD, ShardedActor, bits
from torch.distributed.tensor import DTensor

from torpor import Sleeper, checkpoint
from torpor.checkpoint import latest, load_checkpoint, save_checkpoint
from torpor.errors import RankError, StateError, StoreError, UsageError
from torpor.stores.file import FileStore

STEPS = 2


def _sleeper(actor: ShardedActor, **options: Any) -> Sleeper:
    return Sleeper(actor.model, optimizer=actor.optimizer, memory="resize", **options)


def _whole(actor: ShardedActor) -> dict[str, bytes]:
    """Everything, gathered from all ranks: the same for every number of ranks."""
    found = dict(actor.model.named_parameters()) | dict(actor.model.named_buffers())
    for index, values in enumerate(actor.optimizer.state.values()):
        found |= {f"{index}.{key}": value for key, value in values.items()}
    return {name: bits(t.full_tensor() if isinstance(t, DTensor) else t) for name, t in found.items()}


def _save_asleep(root: str) -> dict[str, Any]:
    """Two steps, a save in the sleep after them, two more steps."""
    actor = ShardedActor()
    losses, path = [], Path()
    with _sleeper(actor, group=dist.group.WORLD) as sleeper:
        for k in range(STEPS):
            actor.step(k)
        actor.optimizer.param_groups[0]["lr"] = 5e-3
        saved = _whole(actor)
        sleeper.sleep()
        values, local = {"position": 17, "weight_version": 2}, {"rng": torch.tensor([dist.get_rank() + 40])}
        path = save_checkpoint(Path(root), STEPS, sleeper, values=values, local=local)
        slept = all(p._local_tensor.untyped_storage().nbytes() == 0 for p in actor.model.parameters())
        sleeper.wake()
        losses = [actor.step(k) for k in range(STEPS, 2 * STEPS)]
    return {"saved": saved, "slept": slept, "path": path.name, "losses": losses, "end": actor.bits()}


def _resume(root: str) -> dict[str, Any]:
    actor = ShardedActor()
    for parameter in actor.model.parameters():
        torch.nn.init.zeros_(parameter)
    with _sleeper(actor) as sleeper:
        loaded = load_checkpoint(latest(Path(root)), sleeper)
    facts: dict[str, Any] = {"whole": _whole(actor), "loaded": (loaded.step, loaded.values, loaded.world_size)}
    facts["rng"] = {name: tensor.item() for name, tensor in loaded.local.items()}
    facts["lr"] = actor.optimizer.param_groups[0]["lr"]
    facts["losses"] = [actor.step(k) for k in range(STEPS, 2 * STEPS)]
    return facts | {"end": actor.bits()}


def test_a_checkpoint_taken_asleep_is_resumed_with_any_number_of_ranks(tmp_path: Path) -> None:
    unbroken = run_ranks(_save_asleep, str(tmp_path))
    assert {(facts["path"], facts["slept"]) for facts in unbroken} == {("step-00000002", True)}
    assert latest(tmp_path).name == "step-00000002"
    for size in (1, 2, 3):
        for rank, facts in enumerate(run_ranks(_resume, str(tmp_path), world_size=size)):
            differ = [name for name, value in unbroken[0]["saved"].items() if facts["whole"][name] != value]
            assert differ == []
            assert facts["whole"].keys() == unbroken[0]["saved"].keys()
            assert facts["loaded"] == (STEPS, {"position": 17, "weight_version": 2}, 2)
            assert facts["rng"] == ({"rng": 40 + rank} if rank < 2 else {})
            assert facts["lr"] == 5e-3
            if size == 2:
                assert facts["losses"] == unbroken[rank]["losses"]
                assert facts["end"] == unbroken[rank]["end"]


def _save_one_and_die_in_the_next(root: str, moment: int) -> int:
    """The first rank is killed at the `moment`-th time that something is brought to the disk."""
    actor = ShardedActor()
    with _sleeper(actor) as sleeper:
        actor.step(0)
        save_checkpoint(Path(root), 1, sleeper)
        actor.step(1)
        sleeper.sleep()
        if dist.get_rank() == 0:
            _die_at_sync(moment)
        try:
            save_checkpoint(Path(root), 2, sleeper, keep=1)
        except (RuntimeError, RankError):
            return 1  # the other rank: its peer is gone
    return 0


def _die_at_sync(moment: int) -> None:
    calls, real = iter(range(1, 1000)), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync


#: Which time something is brought to the disk -> the checkpoint that must be there if the run is killed then.
#: First the shards and the metadata, then the directory's files, the directory, its new name, and `latest`.
MOMENTS = {1: 1, 2: 1, 8: 1, 9: 1, 10: 1, 11: 2}


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    for moment, step in MOMENTS.items():
        root = tmp_path / str(moment)
        run_ranks(_save_one_and_die_in_the_next, str(root), moment, dying=[0])
        assert latest(root).name == f"step-0000000{step}", moment
    [found] = run_ranks(_load_each, str(tmp_path), world_size=1)
    assert found == {moment: {"step": step, "rows": ODD, "left": []} for moment, step in MOMENTS.items()}


def _load_each(roots: str) -> dict[int, dict[str, Any]]:
    """Every one of them can be loaded, and the next save removes what was half done."""
    actor, found = ShardedActor(), {}
    with _sleeper(actor) as sleeper:
        for moment in MOMENTS:
            root = Path(roots) / str(moment)
            loaded = load_checkpoint(latest(root), sleeper)
            save_checkpoint(root, 9, sleeper, keep=1)
            left = [path.name for path in root.iterdir() if path.name not in ("latest", "step-00000009")]
            found[moment] = {"step": loaded.step, "rows": actor.model[0].up.weight.shape[0], "left": left}
    return found


class BrokenStore(FileStore):
    """Reads fail once it is told so."""

    broken = False

    def read_block(self, *arguments: Any) -> None:
        if self.broken:
            raise StoreError("bad sector")
        super().read_block(*arguments)


def _fail_to_read(root: str) -> tuple[int, str, str, bool]:
    actor, store = ShardedActor(), BrokenStore(Path(os.environ["TORPOR_DIR"]))
    with _sleeper(actor, store=store) as sleeper:
        save_checkpoint(Path(root), 1, sleeper)
        actor.step(0)
        sleeper.sleep()
        store.broken = dist.get_rank() == 1
        try:
            save_checkpoint(Path(root), 2, sleeper)
        except RankError as error:
            facts = error.rank, error.kind, error.failures[error.rank]
        store.broken = False
        sleeper.wake()
        actor.step(1)
    return *facts, latest(Path(root)).name == "step-00000001"


def test_a_rank_that_cannot_read_its_shards_is_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    assert run_ranks(_fail_to_read, str(tmp_path)) == [(1, "StoreError", "bad sector", True)] * 2


def _refusals(root: str) -> list[str]:
    actor, said = ShardedActor(), []
    other = torch.optim.SGD([{"params": [p]} for p in actor.model.parameters()], momentum=0.9)

    def expect(kind: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            said.append(str(error))

    with _sleeper(actor) as sleeper, Sleeper(actor.model, optimizer=other) as others:
        expect(UsageError, lambda: latest(Path(root)))
        expect(UsageError, lambda: save_checkpoint(Path(root), 1, sleeper, values={"path": Path("x")}))
        path = save_checkpoint(Path(root), 1, sleeper)
        again = save_checkpoint(Path(root), 1, sleeper)
        expect(UsageError, lambda: load_checkpoint(path, others))
        expect(UsageError, lambda: load_checkpoint(path / "nowhere", sleeper))
        with sleeper.asleep():
            expect(StateError, lambda: load_checkpoint(path, sleeper))
    return [*said, again.name]


def test_misuse_is_refused_with_the_way_out(tmp_path: Path) -> None:
    [said] = run_ranks(_refusals, str(tmp_path), world_size=1)
    assert "nothing was saved there" in said[0]
    assert "JSON" in said[1]
    assert "has 10 parameter groups, the checkpoint has 1" in said[2]
    assert "is no checkpoint" in said[3]
    assert "wake()" in said[4]
    assert said[5] == "step-00000001.1"


def test_one_process_without_any_group_saves_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    with Sleeper(model, optimizer=optimizer, memory="resize", store_dir=tmp_path / "store") as sleeper:
        sleeper.sleep()
        path = save_checkpoint(tmp_path / "run", 3, sleeper)
        sleeper.wake()
        torch.nn.init.zeros_(model.weight)
        objects = [id(s["exp_avg"]) for s in optimizer.state.values()]
        optimizer.zero_grad()
        model(torch.ones(1, 300)).square().sum().backward()
        optimizer.step()
        load_checkpoint(path, sleeper)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))
    assert objects == [id(s["exp_avg"]) for s in optimizer.state.values()]
    assert checkpoint.latest(tmp_path / "run") == path
