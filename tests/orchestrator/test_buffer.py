"""The buffer: passes over the tasks, repeatable."""

from prl.orchestrator.buffer import Buffer, BufferConfig


def take(n, *, tasks=5, seed=0, shuffle=True):
    buffer = Buffer(BufferConfig(shuffle=shuffle), [f"task {i}" for i in range(tasks)], seed)
    return [buffer.next() for _ in range(n)], buffer


def test_no_task_comes_twice_before_all_have_come_once():
    got, buffer = take(15)
    assert all(len(set(got[start : start + 5])) == 5 for start in (0, 5, 10))
    assert buffer.passes == 3


def test_each_pass_has_an_order_of_its_own():
    got, _ = take(40, tasks=20)
    assert got[:20] != got[20:] and sorted(got[:20]) == sorted(got[20:])


def test_the_seed_alone_decides_the_order():
    assert take(12, seed=3)[0] == take(12, seed=3)[0]
    assert take(12, seed=3)[0] != take(12, seed=4)[0]


def test_without_shuffling_tasks_come_as_they_are():
    assert take(7, shuffle=False)[0] == [f"task {i % 5}" for i in range(7)]


def test_a_single_task_comes_again_and_again():
    assert take(3, tasks=1)[0] == ["task 0"] * 3
