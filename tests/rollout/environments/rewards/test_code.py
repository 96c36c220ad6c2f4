"""The code reward: right and wrong programs, the forms of tests, and programs that try to forge the verdict."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keel.rollout.environments.rewards import code as code_module
from keel.rollout.environments.rewards import sandbox
from keel.rollout.environments.rewards.code import code, detect_kind, extract_program, parse_pairs

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4\n"
HUMAN_EVAL = (
    "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 7) == 12\n"
)
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 7\n", "output": "12"}]
ECHO_SUM = "print(sum(map(int, input().split())))"


def fenced(program: str) -> str:
    return f"The idea is simple.\n\n```python\n{program}\n```\nThat is all."


def score(program: str, tests: object, **columns: object) -> float:
    return code(timeout=10.0)(program, tests=tests, **columns)


# --- extraction and checks of the dataset, without processes


def test_the_last_python_block_is_the_program():
    text = "```python\nfirst\n```\nthen\n```py\nsecond\n```\noutput:\n```\n3\n```\n```text\nnone\n```"
    assert extract_program(text) == "second\n"


def test_a_block_without_language_counts_if_no_other_does():
    assert extract_program("so\n```\nx = 1\n```\n") == "x = 1\n"


def test_text_without_a_block_is_the_program():
    assert extract_program(ADD) == ADD


def test_a_block_may_hold_backticks_and_may_be_cut_off():
    assert extract_program("```python\nx = '```'\ny = 2") == "x = '```'\ny = 2"


@pytest.mark.parametrize(
    ("tests", "kind"),
    [
        (TESTS, "assertions"),
        (["assert add(1, 2) == 3"], "assertions"),
        ('["assert add(1, 2) == 3"]', "assertions"),
        (PAIRS, "stdin"),
        ('[{"input": "1", "output": "2"}]', "stdin"),
        ({"inputs": ["1"], "outputs": ["2"]}, "stdin"),
        ("[x for x in [1]]\nassert add(1, 2) == 3", "assertions"),
    ],
)
def test_the_kind_of_tests_is_detected(tests, kind):
    assert detect_kind(tests) == kind


def test_pairs_may_be_lines_or_columns():
    assert parse_pairs({"inputs": [["1", "2"]], "outputs": ["3"]}, "tests") == [("1\n2", "3")]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, r'tests_column = "tests" is not a column of the task; columns: \["answer", "tests"\]'),
        ("", r'column "tests" must be Python source with assertions'),
        ("assert (", r'column "tests" is not valid Python'),
        ("import numpy\nassert add(1, 2) == 3", r'column "tests" imports numpy: the sandbox has only the standard'),
        (HUMAN_EVAL, r'column "tests" defines check\(candidate\) but there is no column "entry_point"'),
        ("async def test_add():\n    assert add(1, 2) == 3", r'column "tests" has an async test function'),
        ([{"input": "1"}], r'column "tests" must hold \{"input", "output"\} pairs'),
        ({"inputs": ["1"], "outputs": []}, r'column "tests" has 1 inputs and 0 outputs'),
    ],
)
def test_an_error_of_the_dataset_is_an_error_not_a_reward(tests, message):
    with pytest.raises(ValueError, match=message.replace('"answer", "tests"', "'answer', 'tests'")):
        code()(ADD, tests=tests, answer=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "doctest"}, 'kind = "doctest"'),
        ({"language": "c"}, 'language = "c"'),
        ({"timeout": -1}, "timeout = -1"),
        ({"total_timeout": 0}, "total_timeout = 0 must be a number greater than 0"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        code(**options)


def test_required_isolation_is_an_error_without_bubblewrap(monkeypatch):
    monkeypatch.setattr(sandbox, "_probe", lambda: ("rlimits", "bwrap is not installed"))
    with pytest.raises(sandbox.SandboxError, match="bwrap is not installed"):
        code(require_isolation=True)


def test_a_completion_of_megabytes_scores_zero_without_running():
    assert code()("x = 1\n" * 100_000, tests=TESTS) == 0.0


def test_the_modules_import_only_the_standard_library_and_each_other():
    folder = Path(code_module.__file__).parent
    own = {
        "code",
        "program_process",
        "remote_objects",
        "sandbox",
        "sandbox_bootstrap",
        "value_codec",
        "verdict_process",
    }
    for name in own:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for imported in names:
                if imported.startswith("keel."):
                    assert set(imported.split(".")) & own, imported
                else:
                    assert imported.partition(".")[0] in sys.stdlib_module_names, imported


@pytest.mark.process
def test_importing_the_reward_loads_neither_torch_nor_the_rest_of_keel():
    source = "import sys, keel.rollout.environments.rewards.code\nprint(sorted(m for m in sys.modules if m in "
    source += "('torch', 'numpy', 'pydantic', 'keel.config', 'keel.inference')))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_the_example_of_the_page_prints_what_is_shown():
    if sandbox.isolation() != "bubblewrap":
        pytest.skip("the page shows a machine with bubblewrap")
    page = (Path(__file__).parents[4] / "docs/code_execution.md").read_text()
    example, shown = re.findall(r"^```(?:python)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_the_page_lists_every_option_with_its_default():
    page = (Path(__file__).parents[4] / "docs/code_execution.md").read_text()
    for name, parameter in inspect.signature(code).parameters.items():
        default = str(parameter.default) if isinstance(parameter.default, float | int) else f'"{parameter.default}"'
        assert re.search(rf"^\| `{name}` \| `?{re.escape(default)}`? \|", page, re.MULTILINE), name


# --- programs


@pytest.mark.process
class TestPrograms:
    @pytest.mark.parametrize("tests", [TESTS, TESTS.splitlines(), "from solution import add\n" + TESTS])
    def test_a_right_program_scores_one(self, tests):
        assert score(fenced(ADD), tests) == 1.0

    @pytest.mark.parametrize(
        "program",
        [
            "def add(a, b):\n    return a - b",
            "def add(a, b):\n    return 3",
            "def add(a, b)\n    return a + b",
            "def sub(a, b):\n    return a - b",
            "import no_such_module\n" + ADD,
            "raise SystemExit(0)",
            "",
            "I cannot do that.",
        ],
    )
    def test_a_wrong_program_scores_zero(self, program):
        assert score(fenced(program), TESTS) == 0.0

    def test_the_main_block_of_a_program_does_not_run_under_assertions(self):
        assert score(ADD + "if __name__ == '__main__':\n    raise SystemExit(input())", TESTS) == 1.0

    def test_check_gets_the_entry_point(self):
        assert score(ADD, HUMAN_EVAL, entry_point="add") == 1.0
        assert score(ADD.replace("+", "*"), HUMAN_EVAL, entry_point="add") == 0.0

    def test_the_entry_point_may_be_a_method(self):
        program = "class Solution:\n    def add(self, a, b):\n        return a + b"
        assert score(program, HUMAN_EVAL, entry_point="Solution().add") == 1.0

    def test_unittest_classes_and_test_functions_run(self):
        unit = "import unittest\nclass TestAdd(unittest.TestCase):\n    def test_one(self):\n        "
        assert score(ADD, unit + "self.assertEqual(add(1, 2), 3)") == 1.0
        assert score(ADD, unit + "self.assertEqual(add(1, 2), 4)") == 0.0
        assert score(ADD, "def test_one():\n    assert add(1, 2) == 4") == 0.0

    def test_partial_rewards_are_the_fraction_of_passed_assertions(self):
        reward = code(partial=True)
        tests = TESTS + "assert add(1, 1) == 3\nassert add('a', 1) == 'a1'\n"
        assert reward(ADD, tests=tests) == 0.5
        assert reward(ADD, tests=HUMAN_EVAL + "    assert candidate(1, 1) == 1\n", entry_point="add") == pytest.approx(
            2 / 3
        )
        assert reward(ADD, tests=TESTS + "missing(1)\nassert add(0, 0) == 0\n") == pytest.approx(2 / 3)
        assert reward(ADD, tests="class Box:\n    pass\nadd(1, 2)") == 1.0
        assert reward("def add(", tests=tests) == 0.0

    def test_standard_input_and_output(self):
        assert score(fenced(ECHO_SUM), PAIRS) == 1.0
        assert score(fenced("print(3)"), PAIRS) == 0.0
        assert score(fenced("print(3 "), PAIRS) == 0.0
        assert code(partial=True)(fenced("print(3)"), tests=PAIRS) == 0.5

    def test_trailing_space_is_ignored_and_other_differences_are_not(self):
        pairs = [{"input": "", "output": "a\nb\n"}]
        assert score("print('a  ')\nprint('b')\nprint()", pairs) == 1.0
        assert score("print('a b')", pairs) == 0.0
        assert score("print(' a')\nprint('b')", pairs) == 0.0

    def test_the_right_output_with_an_exception_scores_zero(self):
        assert score(ECHO_SUM + "\nraise ValueError", PAIRS) == 0.0

    def test_everything_is_over_after_the_time_limit(self):
        started = time.monotonic()
        assert code(timeout=1.0)("def add(a, b):\n    while True: pass", tests=TESTS) == 0.0
        assert code(timeout=1.0, partial=True)("while True: pass", tests=PAIRS * 5) == 0.0
        assert time.monotonic() - started < 6

    def test_all_pairs_together_have_a_time_limit(self):
        started, slow = time.monotonic(), "import time; time.sleep(0.7)\n" + ECHO_SUM
        assert code(timeout=1.5, total_timeout=2.0, partial=True)(slow, tests=PAIRS[:1] * 40) < 0.2
        assert time.monotonic() - started < 10

    def test_it_works_under_plain_limits(self, monkeypatch):
        monkeypatch.setattr(sandbox, "isolation", lambda: "rlimits")
        assert score(ADD, TESTS) == 1.0
        assert score("import os\nos._exit(0)", TESTS) == 0.0
        assert score(ECHO_SUM, PAIRS) == 1.0


@pytest.mark.process
def test_rewards_in_threads_leave_no_files_and_no_descriptors(either_isolation, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reward = code(timeout=20.0)
    jobs = [(ADD, TESTS, 1.0), ("import os; os._exit(0)", TESTS, 0.0), (ECHO_SUM, PAIRS, 1.0), ("1 +", PAIRS, 0.0)] * 2
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(3) as pool:
        scores = list(pool.map(lambda job: reward(job[0], tests=job[1]), jobs))
    assert scores == [expected for _, _, expected in jobs]
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


VALUES = """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
import datetime, enum, math
Point = namedtuple("Point", "x y")
class TooBig(ValueError): pass
class Color(enum.Enum):
    RED = 1
@dataclass
class Money:
    amount: int
    def __add__(self, other): return Money(self.amount + other.amount)
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
def same(x): return x
def sort(items): items.sort()
def transpose(rows):
    for i in range(len(rows)):
        for j in range(i): rows[i][j], rows[j][i] = rows[j][i], rows[i][j]
def apply(f, *items, **named): return [f(item, **named) for item in items]
def count(n):
    for i in range(n): yield i
def check_size(n):
    if n > 3: raise TooBig(f"{n} is too big")
def quit_now(): raise SystemExit(3)
def total(items): return sum(items)
def point(): return Point(1, 2)
def nested(): return {"a": [1, (2, {3})], 4: frozenset([5])}
def words(text): return Counter(text.split())
def groups():
    result = defaultdict(list)
    result["a"].append(1)
    return result
def adder(n): return lambda x: x + n
class ListNode:
    def __init__(self, value, next=None): self.value, self.next = value, next
def second(node): return node.next
"""


VALUE_TESTS = r"""
for x in (None, True, 1, -2.5, 10**5000, 'ü\ud800', b'\xff', 1j, (1,), [1], {1}, {1: 2}, range(3), bytearray(b'a')):
    assert same(x) == x and type(same(x)) is type(x)
---
import decimal, fractions
for x in (decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2024, 2, 29), deque([1, 2]),
          datetime.datetime(2024, 2, 29, 1, 2), datetime.timedelta(1, 2, 3), OrderedDict(a=1)):
    assert same(x) == x and type(same(x)) is type(x)
---
assert math.isnan(same(float('nan'))) and same(float('inf')) == math.inf
---
items = [3, 1, 2]
assert sort(items) is None
assert items == [1, 2, 3]
---
rows = [[1, 2], [3, 4]]
first = rows[0]
transpose(rows)
assert rows == [[1, 3], [2, 4]] and rows[0] is first
---
assert apply(lambda x: x * 2, 1, 2) == [2, 4]
assert apply(len, 'ab', [1]) == [2, 1]
---
def shifted(x, by): return x + by
assert apply(shifted, 1, by=5) == [6]
---
assert list(count(3)) == [0, 1, 2]
assert sum(count(4)) == 6 and 2 in count(3) and 7 not in count(3)
---
assert total(x for x in (1, 2, 3)) == 6
assert total(iter([4])) == 4
---
try:
    check_size(5)
    assert False
except TooBig as error:
    assert str(error) == '5 is too big'
---
import unittest
class T(unittest.TestCase):
    def test(self):
        with self.assertRaises(ValueError):
            check_size(5)
        with self.assertRaises(SystemExit):
            quit_now()
---
s = Stack()
s.push(1)
s.push('a')
assert len(s) == 2 and s.items == [1, 'a'] and list(s) == [1, 'a']
assert isinstance(s, Stack) and not isinstance(s, Money)
with s as t:
    assert t is s
assert not s.items
---
assert Money(1) == Money(1) and Money(1) != Money(2)
assert Money(1) + Money(2) == Money(3) and Money(4).amount == 4
---
m = Money(1)
m.amount = 7
assert m.amount == 7 and repr(m) == 'Money(amount=7)'
---
assert Color.RED == Color(1) and Color.RED.name == 'RED'
---
p = point()
assert p == (1, 2) and p.x == 1 and p.y == 2
---
assert nested() == {'a': [1, (2, {3})], 4: frozenset([5])}
---
assert words('a b a') == {'a': 2, 'b': 1} and words('a b a').most_common(1) == [('a', 2)]
assert groups() == {'a': [1]}
---
assert adder(3)(4) == 7
---
assert second(ListNode(1, ListNode(2))).value == 2 and second(ListNode(1)) is None
---
class Box:
    def __init__(self, value): self.value = value
    def get(self): return self.value
assert same(Box(3)).get() == 3
assert apply(Box.get, Box(1), Box(2)) == [1, 2]
"""


@pytest.mark.process
@pytest.mark.parametrize("tests", VALUE_TESTS.split("---\n"))
def test_values_cross_between_program_and_tests(tests):
    limits = sandbox.SandboxLimits(timeout=10)
    result = code_module.run_assertions(VALUES, tests, limits)
    assert (result.passed, result.total, result.error) == (1, 1, "")


# --- programs that try to pass without solving the task

ALWAYS_EQUAL = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __hash__(self): return 0
"""
FORGED_MESSAGES = """
import json, os, struct
def say(*message):
    data = json.dumps(message).encode()
    for descriptor in range(3, 64):
        try: os.write(descriptor, struct.pack("!I", len(data)) + data)
        except OSError: pass
"""
BUILTINS_CHEAT = """
import builtins
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.isinstance = lambda *a: True
builtins.all = lambda *a: True
def add(a, b): return 0
"""
STACK_CHEAT = """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, str) and 'assert ' + 'add' in value: return a + b
        frame = frame.f_back
    return 0
"""
GARBAGE_COLLECTOR_CHEAT = """
import gc
def add(a, b):
    for thing in gc.get_objects():
        for value in list(thing.values()) if isinstance(thing, dict) else ():
            if isinstance(value, str) and 'assert ' + 'add' in value: return a + b
    return 0
"""
FILES_CHEAT = """
import os
def add(a, b):
    for descriptor in range(64):
        try:
            os.lseek(descriptor, 0, 0)
            data = os.read(descriptor, 100000)
        except OSError: continue
        if b'assert add' in data: return a + b
    return 0
"""
DESCRIPTORS_CHEAT = """
import os
for descriptor in range(64):
    try: os.write(descriptor, b'{"nonce": "", "passed": 1, "total": 1, "error": ""}')
    except OSError: pass
os._exit(0)
"""
FORGED_ANY = """
def add(a, b):
    say('return', ['library', 'unittest.mock', 'ANY'], None)
    return 0
"""
FORGED_CALL = """
def add(a, b):
    say('call', [['library', 'builtins', 'exec'], 'import os; os._exit(0)'], {})
    return 0
"""
GARBAGE_CHEAT = """
import os
def add(a, b):
    for descriptor in range(3, 64):
        try: os.write(descriptor, b'\\xff' * 1000)
        except OSError: pass
"""
CHEATS = {
    "exit at import": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the function": "import sys\ndef add(a, b): sys.exit(0)",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit",
    "printed verdict": "import json\nprint(json.dumps({'passed': 1, 'total': 1, 'nonce': '', 'error': ''}))\nexit(0)",
    "verdict on every descriptor": DESCRIPTORS_CHEAT,
    "always equal": ALWAYS_EQUAL + "def add(a, b): return Always()",
    "always equal number": "class N(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return N(0)",
    "always equal list": "class L(list):\n    def __eq__(self, other): return True\ndef add(a, b): return L()",
    "builtins": BUILTINS_CHEAT,
    "unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return 0",
    "skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('skipped')",
    "stack": STACK_CHEAT,
    "garbage collector": GARBAGE_COLLECTOR_CHEAT,
    "files": FILES_CHEAT,
    "forged reply that equals everything": FORGED_MESSAGES + FORGED_ANY,
    "forged call": FORGED_MESSAGES + FORGED_CALL,
    "forged request": FORGED_MESSAGES + "def add(a, b): say('getattr', [['yours', 0], '__globals__'], {})",
    "garbage": GARBAGE_CHEAT,
    "closed connection": "import os\nos.closerange(3, 64)\ndef add(a, b): return 0",
}


@pytest.mark.process
class TestCheats:
    @pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
    def test_a_cheat_scores_zero(self, cheat):
        assert score(cheat, TESTS) == 0.0

    @pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
    def test_a_cheat_scores_zero_with_partial_rewards(self, cheat):
        assert code(partial=True)(cheat, tests=TESTS) == 0.0

    @pytest.mark.parametrize(
        "tests",
        [
            "assert add(1, 2) in (3, 4)",
            "assert add(1, 2) in [3]",
            "assert 3 == add(1, 2)",
            "assert not add(1, 2) != 3",
            "assert [add(1, 2)] == [3]",
            "assert {3: 1}[add(1, 2)]",
            "assert abs(add(1, 2) - 3) < 1e-6",
            "assert abs(3 - add(1, 2)) < 1e-6",
            "assert 2 < add(1, 2) < 4",
            "assert 3 in add(1, 2)",
            "import math\nassert math.isclose(add(1, 2), 3)",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(add(1, 2), 3)",
        ],
    )
    def test_an_object_that_equals_everything_equals_nothing(self, tests):
        assert score(CHEATS["always equal"], tests) == 0.0
        assert score(ADD, tests.replace("in add(1, 2)", "in [add(1, 2)]")) == 1.0

    def test_skipping_does_not_pass_a_unittest(self):
        unit = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)"
        assert score(CHEATS["skip"], unit) == 0.0
        assert score(CHEATS["unittest"], unit) == 0.0

    @pytest.mark.parametrize("handler", ["except Exception", "except BaseException", "except"])
    def test_an_exit_is_not_an_expected_exception(self, handler):
        tests = f"try:\n    add(None, 1)\n    raise AssertionError\n{handler}:\n    pass"
        assert score("import os\ndef add(a, b): os._exit(0)", tests) == 0.0

    def test_builtins_of_the_program_do_not_replace_those_of_the_tests(self):
        cheat = "def add(a, b): return 0\nall = any = isinstance = lambda *a: True\ndef abs(x): return 0\n"
        assert score(cheat, "assert all([add(1, 2) == 3])") == 0.0
        assert score(cheat, "assert abs(add(1, 2) - 3) < 1e-6") == 0.0

    def test_a_task_may_ask_for_a_function_with_the_name_of_a_builtin(self):
        assert score("def sum(a, b):\n    return a * b", "assert sum(2, 5) == 10") == 1.0

    def test_modules_of_the_program_do_not_replace_those_of_the_tests(self):
        cheat = "import math\nmath.isclose = lambda *a, **k: True\ndef add(a, b): return 0"
        assert score(cheat, "assert math.isclose(add(1, 2), 3)") == 0.0

    @pytest.mark.parametrize("attribute", ["__globals__", "__code__", "__closure__", "__class__", "gi_frame"])
    def test_a_function_of_the_tests_does_not_lead_to_their_source(self, attribute):
        program = f"def add(f):\n    try: f._connection.request('getattr', f, {attribute!r})\n"
        program += "    except AttributeError: return 'hidden'\n    return 'found'"
        assert score(program, "EXPECTED = 3\nassert add(lambda: EXPECTED) == 'hidden'") == 1.0

    def test_functions_of_the_library_cannot_be_called_in_the_test_process(self):
        program = "def add(f):\n    message = ['call', [['library', 'builtins', 'len'], 'abc'], {}]\n"
        program += "    try: return f._connection._exchange(message)[0]\n    except TypeError: return 'refused'"
        assert score(program, "assert add(lambda: 1) == 'refused'") == 1.0

    @pytest.mark.parametrize(
        "program",
        [
            "print('3')\nimport os\nos._exit(0)",
            "import os\nfor n in range(1, 64):\n    try: os.write(n, b'passed')\n    except OSError: pass",
            "import os\nprint(open('/tmp/expected').read())",
            "while True: print('3')",
        ],
    )
    def test_a_cheat_scores_zero_with_input_and_output(self, program):
        assert score(program, PAIRS) == 0.0
