"""Who hangs can still be asked: in real ranks, after init_process_group."""

from __future__ import annotations

from .gang import Gang

ASK = """
import http.client, pathlib, signal, socket, subprocess, threading
from evertrain.worker import contact, session
page = session.current.page_path

def ask(path, method="POST"):
    connection = http.client.HTTPConnection("worker")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(10)
    connection.sock.connect(contact.socket_path(page))
    connection.request(method, path)
    return connection.getresponse().read()

def groups():
    return [json.loads(line) for line in pathlib.Path(contact.groups_path(page)).read_text().splitlines()]
"""


def test_nothing_is_opened_before_torch_distributed_begins(gang: Gang) -> None:
    script = (
        ASK
        + """
def state():
    files = sorted(file.name for file in pathlib.Path(page).parent.glob(pathlib.Path(page).name + ".*"))
    caught = [line for line in open("/proc/self/status") if line.startswith("SigCgt")]
    return [files, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), caught]
before = state()
session.current.page.write()
say([before[0], before[1:] == state()[1:]])
"""
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0, result.err
    assert result.said == [[], True]
    assert result.page is not None and result.page.dump_signal == 0


def test_torchs_server_answers_and_says_nothing_by_itself(gang: Gang) -> None:
    script = ASK + "join()\ndist.all_reduce(torch.ones(2))\nsay(ask('/handler/fr_trace_json').decode()[:2000])\n"
    for result in gang.run(script):
        assert result.status == 0, result.err
        assert "all_reduce" in result.said
        assert result.out == "" and "WorkerServer" not in result.err


def test_the_server_outlives_the_group_and_hinders_no_exit(gang: Gang) -> None:
    script = (
        ASK
        + """
join()
dist.destroy_process_group()
before = ask("/handler/ping").decode()
os.environ["INIT_METHOD"] += "-again"
join()
child = os.fork()
if child == 0:
    sys.exit(7)
say([before, ask("/handler/ping").decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
"""
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0, result.err
    assert result.said[:2] == ["pong", "pong"]


def test_stacks_come_by_the_signal_that_the_page_names(gang: Gang) -> None:
    script = (
        ASK
        + """
join()
assert subprocess.run([sys.executable, "-c", "pass"]).returncode == 0
number = session.current.page.dump_signal
assert number >= signal.SIGRTMIN
os.kill(os.getpid(), number)
say([number, pathlib.Path(contact.stacks_path(page)).read_text()])
"""
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0, result.err
    assert result.page is not None and result.page.dump_signal == result.said[0]
    assert "most recent call first" in result.said[1] and "script.py" in result.said[1]


def test_a_signal_that_the_script_uses_is_left_to_it(gang: Gang) -> None:
    script = (
        ASK
        + """
first = signal.SIGRTMIN + contact._FIRST_SIGNAL
seen = []
signal.signal(first, lambda *_: seen.append(1))
signal.pthread_sigmask(signal.SIG_BLOCK, [first + 1])
join()
os.kill(os.getpid(), first)
say([session.current.page.dump_signal - first, len(seen)])
"""
    )
    (result,) = gang.run(script, world=1)
    assert result.said == [2, 1], result.err


def test_groups_are_written_down_as_they_come_to_be(gang: Gang) -> None:
    script = (
        ASK
        + """
from torch.distributed.device_mesh import init_device_mesh
join()
pair = dist.new_group([1, 0] if WORLD == 2 else [0], group_desc="pair")
for rank in range(WORLD):
    dist.new_group([rank], group_desc=f"only {rank}")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
say([groups(), pair.group_name, sorted(g.group_name for g in dist.distributed_c10d._world.pg_names)])
"""
    )
    zero, one = gang.run(script)
    assert zero.status == one.status == 0, zero.err + one.err
    written = {each["name"]: each for each in zero.said[0]}
    assert len(written) == len(zero.said[0]), "each once"
    assert sorted(written) == zero.said[2], "all that this rank is a member of"
    assert written["0"]["ranks"] == [0, 1] and written["0"]["desc"] == "default_pg"
    assert written[zero.said[1]]["desc"] == "pair" and sorted(written[zero.said[1]]["ranks"]) == [0, 1]
    assert [each["ranks"] for each in zero.said[0] if each["desc"] == "only 0"] == [[0]]
    assert not [each for each in zero.said[0] if each["desc"] == "only 1"]


def test_a_path_that_is_too_long_costs_the_server_only(gang: Gang) -> None:
    script = (
        "from evertrain.worker import session\n"
        "session.current.page_path += 'x' * 60\n" + ASK + "join()\ndist.all_reduce(torch.ones(1))\nsay(groups())\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0, result.err
    (blind,) = [each["blind"] for each in result.said if "blind" in each]
    assert blind.startswith("flight recorder: no socket can have a path of more than 107 bytes")
    assert [each["name"] for each in result.said if "name" in each] == ["0"]


def test_many_groups_stay_cheap(gang: Gang) -> None:
    script = (
        ASK
        + """
from evertrain.worker import groups as noted
join()
world = dist.distributed_c10d._world
class Group:
    group_desc = "many"
took = 0.0
for number in range(1000):
    group = Group()
    world.pg_group_ranks[group] = {0: 0}
    world.pg_names[group] = f"many {number}"
    began = time.perf_counter()
    noted.note(page, 1)
    took += time.perf_counter() - began
found = groups()
for group in [group for group in world.pg_names if isinstance(group, Group)]:
    del world.pg_names[group], world.pg_group_ranks[group]
say([took, len(found), found[-1]["name"]])
"""
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0, result.err
    assert result.said[1:] == [1001, "many 999"]
    assert result.said[0] < 3.0
