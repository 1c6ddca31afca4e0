"""The site of a federation's page: another promise, another policy, its hash; the ordinary site has no file of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keyfed import __version__
from keyfed.errors import ConfigError
from keyfed.keyboard import federated, serve, site
from keyfed.private.dp.statement import rule_for

SERVER = "https://192.0.2.7:8443"
PROMISED = "What you write stays"  # by the ordinary page


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def sites(one_export, tmp_path_factory) -> tuple[site.Site, site.Site]:
    """The ordinary site and that of a federation."""
    folder = tmp_path_factory.mktemp("sites")
    return site.write_site(one_export, folder / "plain"), federated.write_federated(one_export, folder / "own", SERVER)


def test_the_ordinary_site_has_no_file_of_it_and_nothing_of_its_policy(sites):
    plain, own = (contents(one.folder) for one in sites)
    assert {path.split("/")[0] for path in own.keys() - plain.keys()} == {*site.CLIENT, site.PAGE}
    assert plain.keys() < own.keys()
    shared = {path for path in plain if plain[path] != own[path]}
    assert shared == {site.INDEX, site.HEADER_FILE, site.WORKER, "manifest.webmanifest"}
    assert SERVER not in b"".join(plain.values()).decode("latin-1")
    assert all(f'"{folder}/' not in plain[site.INDEX].decode() for folder in site.CLIENT)
    assert sites[0].hash is None
    for path in own:
        rule = rule_for(path, "site")
        assert rule is not None, path
        assert rule.pattern != "*" or "/" not in path


def test_the_policy_lets_it_speak_to_its_host_and_to_one_server(sites):
    own = contents(sites[1].folder)
    said = site.listed(own[site.WORKER].decode())
    expected = serve.POLICY.replace("connect-src 'self'", f"connect-src 'self' {SERVER}")
    assert expected.count(SERVER) == 1
    assert said["headers"] == {**serve.HEADERS, "content-security-policy": expected}
    assert f"content-security-policy: {expected}\n" in own[site.HEADER_FILE].decode()
    meta = [rule for rule in expected.split("; ") if not rule.startswith("frame-ancestors")]
    assert f'http-equiv="Content-Security-Policy" content="{"; ".join(meta)}"' in own[site.INDEX].decode()
    assert federated.federated_build().policy == serve.POLICY  # from the server itself: nothing but 'self'


def test_it_has_a_promise_of_its_own(sites):
    own = contents(sites[1].folder)
    for path in (site.INDEX, "manifest.webmanifest"):
        text = own[path].decode()
        assert federated.PROMISE in text
        assert PROMISED not in text
        assert "Nothing you type leaves" not in text
    assert b'src="federated/page.mjs"' in own[site.INDEX]
    assert b'src="page.mjs"' not in own[site.INDEX]


def test_its_hash_is_that_of_its_code_wherever_it_is_installed(sites, one_export, tmp_path):
    """Another server, its policy and another model do not change it: people of two places can compare it."""
    own = contents(sites[1].folder)
    said = json.loads(own[site.PAGE])
    assert said == {"version": __version__, "hash": sites[1].hash, "server": SERVER}
    assert f"hash {said['hash']}" in site.site_text(sites[1])
    assert json.loads(own[federated.APP])["keyfed"] == {"version": __version__, "hash": said["hash"]}
    here = federated.write_federated(one_export, tmp_path / "here")
    other = contents(here.folder)
    assert other[site.INDEX] != own[site.INDEX]  # the policy
    assert here.hash == said["hash"]
    another = dict(own) | {"model/weights.safetensors": b"another model"}
    assert federated.hash_of(another, (site.WEB / site.WORKER).read_bytes()) == said["hash"]


def edited(web: Path, path: str) -> None:
    text = (web / path).read_bytes()
    (web / path).write_bytes(text[:-1] + b" " + text[-1:])


PATHS = ["federated/trainer.mjs", "secure/member.mjs", "page.mjs", "worker.mjs", "style.css", "icon-192.png"]
PATHS += ["data/layouts.json", site.INDEX, site.WORKER, federated.APP]


def test_its_hash_is_another_after_a_change_of_any_file_of_the_code(sites, one_export, tmp_path):
    covered = {path for path in contents(sites[1].folder) if not path.startswith("model/")}
    assert covered >= set(PATHS)
    hashes = {sites[1].hash}
    web = Path(shutil.copytree(site.WEB, tmp_path / "web"))
    for n, path in enumerate(PATHS):
        if path == federated.APP:
            (web / path).write_text((web / path).read_text().replace('"en"', '"fr"'))
        else:
            edited(web, path)
        hashes.add(federated.write_federated(one_export, tmp_path / f"site-{n}", SERVER, web).hash)
    assert len(hashes) == len(PATHS) + 1


@pytest.mark.parametrize(
    "server",
    [
        "http://192.0.2.7",
        "https://a.test/",
        "https://a.test; script-src *",
        "https://*.test",
        "https://A.test",
        "",
        "a",
    ],
)
def test_a_server_that_is_no_origin_is_refused(server):
    with pytest.raises(ConfigError, match="expected https://HOST"):
        federated.federated_build(server)


def test_from_the_command_line(keyfed, one_export, tmp_path):
    folder = tmp_path / "public"
    code, out, err = keyfed("export", one_export, "--site", folder, "--federated", "--server", SERVER, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["hash"] == json.loads((folder / site.PAGE).read_text())["hash"]
    code, _, _ = keyfed("export", one_export, "--site", folder)  # the ordinary page in its place
    assert code == 0
    assert not (folder / "federated" / "page.mjs").exists()
    assert not (folder / site.PAGE).exists()
    for arguments, said in [
        ((one_export, "--federated"), "give its folder with --site"),
        ((one_export, "--site", tmp_path / "x", "--server", SERVER), "add --federated"),
        ((one_export, "--site", tmp_path / "x", "--federated", "--server", "a.test"), "expected https://HOST"),
    ]:
        code, _, err = keyfed("export", *arguments)
        assert code == 2, arguments
        assert said in err, arguments
        assert len(err.strip().splitlines()) == 1
