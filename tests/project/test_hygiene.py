"""What must not be in any file of the project, whoever writes it."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:root|tmp|work|home/\w+|Users/\w+)(?:/|\b(?![-.\w]))")
URL_HOST = re.compile(r"\b(?:https?|ftp)://([\w.-]+)")
REGISTRY = re.compile(
    r"pypi|pythonhosted|artifactory|jfrog|nexus|devpi|mirror|npmjs|anaconda|registry|wheels?\.",
    re.IGNORECASE,
)
PUBLIC_PAGES = {"pypi.org", "pytorch.org", "download.pytorch.org"}
LOCAL_FILE = re.compile(r"\bfile://")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
NAMES_ISSUE_OR_VERSION = re.compile(r"#\d+|\bv?\d+\.\d+")


# The tests of these very rules need examples.
THIS_FILE = Path(__file__).relative_to(ROOT).as_posix()


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def tracked_texts() -> list[tuple[str, str]]:
    texts = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data:
            texts.append((path.relative_to(ROOT).as_posix(), data.decode("utf-8")))
    return texts


def python_texts(folder: str = "") -> list[tuple[str, str]]:
    return [
        (path, text)
        for path, text in tracked_texts()
        if path.endswith(".py") and path.startswith(folder)
    ]


def find_machine_paths(text: str) -> list[str]:
    return [match[0] for match in MACHINE_PATH.finditer(text)]


def find_registry_hosts(text: str) -> list[str]:
    hosts = [host for host in URL_HOST.findall(text) if REGISTRY.search(host)]
    return [host for host in hosts if host not in PUBLIC_PAGES] + LOCAL_FILE.findall(text)


def find_unfinished(source: str) -> list[str]:
    """Comments that put something off and name no issue (#12) and no version (0.2)."""
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return [
        comment
        for comment in comments
        if UNFINISHED.search(comment) and not NAMES_ISSUE_OR_VERSION.search(comment)
    ]


def find_loose_assertions(source: str) -> list[str]:
    """Numeric comparisons with a tolerance of their own: assert_within_budget is the only one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(node, (ast.Attribute, ast.Name)) and re.fullmatch(r"\w*allclose\w*", name):
            found.append(f"{node.lineno}: {name}")
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called == "assert_close" and not _is_exact(node):
            found.append(f"{node.lineno}: assert_close without rtol=0, atol=0")
    return found


def _is_exact(call: ast.Call) -> bool:
    zeros = {
        keyword.arg
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant) and keyword.value.value == 0
    }
    return {"rtol", "atol"} <= zeros


def test_no_path_of_a_machine() -> None:
    found = {path: find_machine_paths(text) for path, text in tracked_texts()}
    found.pop(THIS_FILE, None)
    assert {path: paths for path, paths in found.items() if paths} == {}


def test_no_package_registry() -> None:
    found = {path: find_registry_hosts(text) for path, text in tracked_texts()}
    found.pop(THIS_FILE, None)
    assert {path: hosts for path, hosts in found.items() if hosts} == {}


def test_what_is_put_off_names_an_issue_or_a_version() -> None:
    found = {path: find_unfinished(text) for path, text in python_texts()}
    assert {path: comments for path, comments in found.items() if comments} == {}


def test_python_files_parse_under_the_oldest_python() -> None:
    for path, text in python_texts():
        ast.parse(text, path, feature_version=(3, 10))


def test_one_numeric_assertion() -> None:
    found = {path: find_loose_assertions(text) for path, text in python_texts("tests/")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('/tmp/x')", ["/tmp/"]),
        ("cd /root && ls", ["/root"]),
        ("/home/ann/x", ["/home/ann/"]),
        ("https://example.org/tmp/x", []),
        ("build/tmp/x and ./root/x", []),
        ("q/k/v, in/out", []),
    ],
)
def test_machine_path_is_found(text: str, found: list[str]) -> None:
    assert find_machine_paths(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("--index-url https://pypi.internal.example/simple", ["pypi.internal.example"]),
        ("https://files.pythonhosted.org/x.whl", ["files.pythonhosted.org"]),
        ("find-links = file:///wheels", ["file://"]),
        ("https://download.pytorch.org/whl/cpu and https://pypi.org/project/tilewise", []),
        ("https://arxiv.org/abs/2205.14135", []),
    ],
)
def test_registry_host_is_found(text: str, found: list[str]) -> None:
    assert find_registry_hosts(text) == found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = 1  # TODO: later", 1),
        ("x = 1  # TODO(#12): paged", 0),
        ("x = 1  # FIXME in 0.2", 0),
        ("x = 'TODO'", 0),
    ],
)
def test_unfinished_comment_is_found(source: str, count: int) -> None:
    assert len(find_unfinished(source)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert torch.allclose(a, b)", 1),
        ("np.testing.assert_allclose(a, b)", 1),
        ("torch.testing.assert_close(a, b)", 1),
        ("torch.testing.assert_close(a, b, rtol=0, atol=1e-3)", 1),
        ("torch.testing.assert_close(a, b, rtol=0, atol=0)", 0),
        ("assert torch.equal(a, b)  # not allclose", 0),
    ],
)
def test_loose_assertion_is_found(source: str, count: int) -> None:
    assert len(find_loose_assertions(source)) == count
