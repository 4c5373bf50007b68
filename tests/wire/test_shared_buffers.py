"""Buffers that another process opens. On a CPU really; of a GPU, what goes to torch's functions and comes back."""

import ast
import inspect
import os
import subprocess
import sys
import textwrap

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from prl.wire import shared_buffers
from prl.wire.shared_buffers import Handle, Offer, opened, share

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (70, 0)
EXPORTED = (3, b"memory", 128, 512, b"/torch_1", 7, b"event", True)
"""What `_share_cuda_` says of a storage of 128 bytes on the third device."""


def offers(sizes, device, others):
    """Buffers, and what so many others are sent; files as copies, since the maker closes its own."""
    sent = []
    made = share(sizes, device, [lambda *given: sent.append((given[0], [os.dup(f) for f in given[1]]))] * others)
    return made, sent


def test_what_is_written_into_a_buffer_is_read_from_all_that_were_opened():
    made, sent = offers(SIZES, CPU, 2)
    first, second = (opened(message, files, CPU) for message, files in sent)
    for value in (3, 200):
        made[0].fill_(value)
        assert first[0].tolist() == second[0].tolist() == [value] * 70
    assert [len(buffer) for buffer in first] == [len(buffer) for buffer in made] == [70, 0]
    assert made[0].data_ptr() != first[0].data_ptr()


def test_the_file_has_no_name_and_is_gone_with_the_last_buffer():
    before = set(os.listdir("/proc/self/fd"))
    made, [(message, files)] = offers(SIZES, CPU, 1)
    first = opened(message, files, CPU)

    def maps():
        with open("/proc/self/maps") as file:
            return [line.split(maxsplit=5)[5] for line in file if "prl-buckets" in line]

    assert [line.strip() for line in maps()] == ["/memfd:prl-buckets (deleted)"] * 2
    del made
    assert first[0].tolist() == [0] * 70, "whoever has it keeps it"
    del first
    assert maps() == [] and set(os.listdir("/proc/self/fd")) == before


def test_what_was_opened_cannot_be_written():
    """One receiver would change the weights of another: it dies instead."""
    code = """
        import os
        import torch
        from prl.wire.shared_buffers import opened, share
        sent = []
        share((64,), torch.device("cpu"), [lambda message, files: sent.append((message, [os.dup(files[0])]))])
        [buffer] = opened(*sent[0], torch.device("cpu"))
        print(int(buffer.sum()), flush=True)
        buffer.fill_(1)
        print("written")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0\n" and done.returncode < 0, done.stderr


@pytest.mark.parametrize("message", [b"", b"\x00", msgspec.msgpack.encode({"sizes": [1], "handles": [[b"x"]]})])
def test_what_is_no_offer_is_refused_and_its_file_closed(message):
    file = os.memfd_create("x")
    with pytest.raises(ValueError):
        opened(message, [file], CPU)
    with pytest.raises(OSError):
        os.fstat(file)


@pytest.fixture
def gpu(monkeypatch):
    """torch's functions for a GPU, for memory of the CPU's: handles count up, and open what they were made for.

    Tells what was made, as sizes, and what was opened, as arguments.
    """
    empty, exported, made, asked = torch.empty, [], [], []

    def on_cpu(size, *, dtype, device):
        assert device == GPU
        made.append(size)
        return empty(size, dtype=dtype)

    def share_cuda(storage):
        exported.append(storage)
        return (3, b"%d" % (len(exported) - 1), storage.nbytes(), *EXPORTED[3:])

    def new_shared_cuda(*arguments):
        asked.append(arguments)
        return exported[int(arguments[1])]

    monkeypatch.setattr(torch, "empty", on_cpu)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share_cuda)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared_cuda)
    shared_buffers._on_gpu.cache_clear()
    yield made, asked
    shared_buffers._on_gpu.cache_clear()


def test_handles_of_a_gpu_pass_from_torch_to_torch_as_plain_data(gpu):
    """A receiver opens them on its own device, whatever number the sender knows it by."""
    buffers, [(message, files)] = offers(SIZES, GPU, 1)
    first, second = opened(message, files, GPU)
    assert files == [] and (len(first), len(second)) == SIZES and gpu[0][:2] == [128, 64]
    assert gpu[1] == [(0, b"0", 128, *EXPORTED[3:]), (0, b"1", 64, *EXPORTED[3:])]
    buffers[0].fill_(5)
    assert first.tolist() == [5] * 70


def test_each_who_opens_memory_of_a_gpu_has_a_handle_of_its_own_and_there_is_one_pair(gpu):
    """torch counts a handle as one that opens it; what a killed one had opened it never frees."""
    first, sent = offers(SIZES, GPU, 2)
    handles = [msgspec.msgpack.decode(message, type=Offer).handles for message, files in sent if not files]
    assert [[handle.memory for handle in each] for each in handles] == [[b"0", b"1"], [b"2", b"3"]]
    again, _ = offers(SIZES, GPU, 1)
    assert [a.data_ptr() for a in first] == [b.data_ptr() for b in again] and gpu[0] == [128, 64]


def test_torchs_functions_have_the_arguments_that_a_handle_has():
    """Those that torch itself passes, in its order; the first is the device."""
    share_line, rebuild = inspect.getsource(reductions.reduce_tensor), inspect.getsource(reductions.rebuild_cuda_tensor)
    names = ["storage_handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset"]
    names += ["event_handle", "event_sync_required"]

    def calls(source, name):
        tree = ast.parse(textwrap.dedent(source))
        return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(name)]

    [opening] = calls(rebuild, "_new_shared_cuda")
    assert [ast.unparse(argument) for argument in opening.args] == ["storage_device", *names]
    [assigned] = [
        ast.unparse(n.targets[0])
        for n in ast.walk(ast.parse(textwrap.dedent(share_line)))
        if isinstance(n, ast.Assign) and "_share_cuda_()" in ast.unparse(n.value)
    ]
    assert assigned == f"(device, handle, {', '.join(names[1:])})"
    assert len(names) == len(Handle.__struct_fields__)
