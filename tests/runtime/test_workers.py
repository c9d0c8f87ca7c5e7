"""Tests of adapting the number of computing threads, on a simulated machine with given cores and a simulated
clock."""

from __future__ import annotations

from itertools import pairwise

from mlcbuild_runtime.devices.workers import Workers


class Machine:
    """A simulated process of up to four computing threads, with the time of its clock and the CPU time that
    it gets."""

    def __init__(self, cores: float) -> None:
        self.cores, self.time, self.spent, self.tries = cores, 0.0, 0.0, list[float]()
        self.free: int | None = None
        self.workers_before = 4
        self.workers = Workers(4, self.use, lambda: self.time, lambda: self.spent, lambda _: self.free)

    def use(self, count: int) -> None:
        if count > self.workers_before:
            self.tries.append(self.time)

    def run(self, seconds: int) -> int:
        """Simulates decode steps for `seconds` seconds of the simulated clock, and returns the number of
        computing threads that is in use afterwards."""
        for _ in range(10 * seconds):
            self.workers_before = self.workers.count
            with self.workers:
                self.time += 0.1001
                self.spent += 0.1001 * min(self.cores, self.workers.count)
        return self.workers.count


def test_fewer_threads_work_on_a_busy_machine() -> None:
    machine = Machine(cores=4)
    assert machine.run(5) == 4 and not machine.tries
    machine.cores = 0.9
    assert machine.run(1) == 1
    machine.run(60)
    gaps = [late - soon for soon, late in pairwise(machine.tries)]
    assert max(gaps) > 15 and len(machine.tries) < 9, "it is tried less and less often"
    machine.cores = 4
    assert machine.run(20) == 4
    machine.cores = 3
    assert machine.run(5) == 4, "nobody waits for long"
    machine.cores = 2.5
    assert machine.run(1) == 2
    machine.cores = 4
    assert machine.run(20) == 4
    with machine.workers:
        machine.time += 30  # weights come from a disk
    assert machine.run(1) == 4


def test_the_system_tells_that_a_machine_is_busy() -> None:
    machine = Machine(cores=1)
    machine.free = 1
    with machine.workers:
        assert machine.workers.count == 1, "from the first step on"
    machine.run(50)
    assert not machine.tries, "nobody tries more threads"
    machine.run(20)
    assert len(machine.tries) == 1, "the system may be wrong"
    machine.cores, machine.free = 4, 3
    assert machine.run(5) == 2, "half of the threads find a core"
    machine.free = 4
    assert machine.run(2) == 4
    machine.free = 0
    assert machine.run(5) == 4, "these threads, which get their time, run themselves"
    machine.time += 1
    assert machine.run(1) == 1, "after a rest only others do"


def test_what_came_before_an_idle_period_does_not_count() -> None:
    machine = Machine(cores=4)
    machine.free = 4
    for wall, cpu in ((0.09, 0.09), (0.02, 0.08)):
        machine.time += 10
        with machine.workers:
            machine.time += wall
            machine.spent += cpu
    assert machine.workers.count == 4, "all four threads had a core after the idle period"


def test_a_trial_ends_with_its_first_window() -> None:
    machine = Machine(cores=0.9)
    machine.run(1)
    assert machine.workers.count == 1
    machine.cores, machine.free = 4, 2
    assert machine.run(5) == 2, "four threads would not have a core each"
    assert machine.workers.settled
