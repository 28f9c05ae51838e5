"""Who may ask a server: keys, names and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilemesh.core.access import KEYS_VARIABLE, Access, host_name, read_keys, server_access
from tilemesh.core.errors import UsageError


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)


def status(access: Access, needs_key: bool = True, **headers: str) -> int:
    refusal = access.refusal({"host": "localhost:8000", **headers}, needs_key)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("LOCALHOST.:1", 200), ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200), ("[::1]", 200), ("evil.com", 403), ("evil.com:8000", 403), ("localhost.evil.com", 403),
        ("127.0.0.1.evil.com", 403), ("", 403), ("[::1].evil.com:80", 403), ("gpu7.local:8000", 403),
    ],
)  # fmt: skip
def test_on_loopback_only_its_own_names_are_answered(host: str, expected: int) -> None:
    assert status(server_access("127.0.0.1", [], [], [], False), host=host) == expected


def test_more_names_are_allowed_by_saying_so() -> None:
    access = server_access("127.0.0.1", [], ["gpu7.local", "Proxy.example:443"], [], False)
    assert status(access, host="GPU7.local:8000") == status(access, host="proxy.example") == 200
    assert status(access, host="other.local") == 403
    for name in ("", "a b", "*", "http://gpu7", "::1", "ü", "gpu7:port"):
        with pytest.raises(UsageError, match=r"--allow-host is '.*': expected names of this machine"):
            server_access("127.0.0.1", [], [name], [], False)


def test_a_public_address_needs_a_key_or_a_word() -> None:
    for address in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(UsageError, match=r"there is no key: give --api-key @FILE .* or --no-key"):
            server_access(address, [], [], [], False)
        assert status(server_access(address, [], [], [], True), host="anything") == 200
        assert status(server_access(address, ["long-enough"], [], [], False), host="anything") == 401
    named = server_access("0.0.0.0", ["long-enough"], ["gpu7"], [], False)
    assert status(named, host="evil.com", authorization="Bearer long-enough") == 403
    assert status(named, host="gpu7", authorization="Bearer long-enough") == 200
    with pytest.raises(UsageError, match="--no-key is given beside keys"):
        server_access("127.0.0.1", ["long-enough"], [], [], True)


def test_one_of_several_keys_opens() -> None:
    access = Access(("first-key", "second-key"))
    assert status(access) == 401
    for key in ("first-key", "second-key"):
        assert status(access, authorization=f"Bearer {key}") == status(access, authorization=f"bearer  {key} ") == 200
    for wrong in (
        "first-key",
        "Bearer",
        "Bearer ",
        "Basic first-key",
        "Bearer first-ke",
        "Bearer first-keyy",
        "Bearer é",
    ):
        assert status(access, authorization=wrong) == 401, wrong
    assert status(access, needs_key=False) == 200
    assert "first-key" not in repr(access)


def test_pages_of_other_sites_are_refused_unless_named() -> None:
    assert status(Access(), origin="http://localhost:8000") == 200  # its own page
    assert status(Access(), origin="https://evil.example") == status(Access(), origin="null") == 403
    named = server_access("127.0.0.1", [], [], ["https://App.example/"], False)
    assert status(named, origin="https://app.example") == 200
    assert status(named, origin="https://app.example.evil") == 403
    assert status(Access(origins=frozenset("*")), origin="https://evil.example") == 200
    with pytest.raises(UsageError, match=r"--allow-origin is 'app\.example'"):
        server_access("127.0.0.1", [], [], ["app.example"], False)


def test_keys_come_from_words_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nkey-of-anna\n\n  key-of-ben \n")
    monkeypatch.setenv(KEYS_VARIABLE, "key-of-env, key-of-anna")
    assert read_keys(["typed-key", f"@{file}"]) == ("key-of-env", "key-of-anna", "typed-key", "key-of-ben")


@pytest.mark.parametrize("word", ["", "short", "with a blank", "ключ-ключ", "x" * 513, "@", "@/nowhere/keys"])
def test_keys_that_cannot_be_sent_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        read_keys([word])


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(UsageError, match="the file has no key"):
        read_keys([f"@{tmp_path / 'keys'}"])


@pytest.mark.parametrize(("host", "name"), [("a:1", "a"), ("A.", "a"), ("[::1]:2", "[::1]"), ("[::1]", "[::1]")])
def test_a_name_is_without_its_port(host: str, name: str) -> None:
    assert host_name(host) == name
