from pathlib import Path

import pytest

import kvtier.v1.admin_pb2
import kvtier.v1.blocks_pb2
import kvtier.v1.caches_pb2
import kvtier.v1.events_pb2
import kvtier.v1.transfer_pb2
from kvtierd.config import ConfigError, read
from kvtierd.rights import ALL_RIGHTS, AllowRule, Anonymous, Certificate, Identity, Right, Rights, User
from kvtierd.service.calls import NEEDS, Over

OWNER = 7
READ, WRITE, WATCH, TOKENS, ADMIN = Right
ALICE = User(1000, frozenset({1000, 44}))
ENGINE = Certificate(frozenset({"engine-1", "engine-1.example"}))


def rule(**fields: object) -> AllowRule:
    return AllowRule.model_validate({"caches": ["*"], "verbs": ["read"], **fields})


@pytest.mark.parametrize("uid", [0, OWNER])
def test_root_and_the_daemons_own_user_need_no_rule(uid: int) -> None:
    rights = Rights([], OWNER)
    who = User(uid, frozenset())
    assert rights.on(who, "any") == rights.somewhere(who) == rights.everywhere(who) == ALL_RIGHTS


@pytest.mark.parametrize("who", [ALICE, ENGINE, Anonymous()])
def test_everybody_else_may_do_nothing(who: Identity) -> None:
    rights = Rights([], OWNER)
    assert rights.on(who, "any") == rights.somewhere(who) == rights.everywhere(who) == frozenset()


def test_a_user_that_the_namespace_does_not_map_is_not_the_daemons_own() -> None:
    unmapped = User(65534, frozenset())
    rights = Rights([], unmapped.uid)
    assert rights.on(unmapped, "any") == rights.everywhere(unmapped) == frozenset()


@pytest.mark.parametrize(
    ("names", "who", "it_is"),
    [
        ({"uids": [1000]}, ALICE, True),
        ({"uids": [1001]}, ALICE, False),
        ({"uids": [44]}, ALICE, False),
        ({"gids": [44]}, ALICE, True),
        ({"gids": [45]}, ALICE, False),
        ({"subjects": ["engine-1.example"]}, ENGINE, True),
        ({"subjects": ["engine-1"]}, ENGINE, True),
        ({"subjects": ["engine-*", "engine", "ENGINE-1"]}, ENGINE, False),
        ({"subjects": ["1000"]}, ALICE, False),
        ({"uids": [0, 1000], "gids": [0]}, ENGINE, False),
        ({"anonymous": True}, Anonymous(), True),
        ({"anonymous": True}, ENGINE, False),
        ({"uids": [1000], "subjects": ["engine-1"]}, Anonymous(), False),
    ],
)
def test_a_rule_holds_for_those_it_names(names: dict[str, object], who: Identity, it_is: bool) -> None:
    assert (READ in Rights([rule(**names)], OWNER).on(who, "cache")) is it_is


def test_rules_add_up_and_caches_are_names_or_patterns() -> None:
    rights = Rights(
        [
            rule(uids=[1000], caches=["llama-*"], verbs=["read", "watch"]),
            rule(gids=[44], caches=["llama-70b", "qwen"], verbs=["write"]),
            rule(uids=[1], caches=["*"], verbs=["admin"]),
        ],
        OWNER,
    )
    assert rights.on(ALICE, "llama-70b") == {READ, WATCH, WRITE}
    assert rights.on(ALICE, "llama-8b") == {READ, WATCH}
    assert rights.on(ALICE, "qwen") == {WRITE}
    assert rights.on(ALICE, "Qwen") == rights.on(ALICE, "llama") == frozenset()
    assert rights.somewhere(ALICE) == {READ, WATCH, WRITE}
    assert rights.everywhere(ALICE) == frozenset()


def test_a_right_on_every_cache_is_one_of_a_rule_for_all_names() -> None:
    rights = Rights([rule(uids=[1000], verbs=["admin"]), rule(uids=[1000], caches=["[a-z]*"])], OWNER)
    assert rights.everywhere(ALICE) == {ADMIN}


def test_rules_are_json_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"uids": [1000], "caches": ["a"], "verbs": ["read"]}'
    (of_flag,) = read(None, {"host_bytes": 4096, "allow": (text,)}).config.allow
    monkeypatch.setenv("KVTIERD_ALLOW", f"[{text}]")
    (of_environment,) = read(None, {"host_bytes": 4096}).config.allow
    assert of_flag == of_environment == rule(uids=[1000], caches=["a"])
    monkeypatch.setenv("KVTIERD_ALLOW", "[1")
    with pytest.raises(ConfigError, match=r"KVTIERD_ALLOW = .\[1.: "):
        read(None, {"host_bytes": 4096})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('uids = [1]\nverbs = ["read"]', "allow[0][caches]"),
        ('uids = [1]\ncaches = ["*"]', "allow[0][verbs]"),
        ('uids = [1]\ncaches = []\nverbs = ["read"]', "allow[0][caches] = []: "),
        ('caches = ["*"]\nverbs = ["read"]', "names nobody: give uids, gids, subjects or anonymous"),
        ('uids = [-1]\ncaches = ["*"]\nverbs = ["read"]', "allow[0][uids][0] = -1: "),
        ('uids = [1]\ncaches = ["*"]\nverbs = ["root"]', "allow[0][verbs][0] = 'root': "),
        ('users = [1]\ncaches = ["*"]\nverbs = ["read"]', "allow[0][users]: there is no such key"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(tmp_path: Path, table: str, says: str) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text(f"host_bytes = 4096\n[[allow]]\n{table}\n")
    with pytest.raises(ConfigError) as refused:
        read(file, {})
    assert says in str(refused.value)
    assert str(file) in str(refused.value)


def test_every_method_of_the_wire_needs_a_right() -> None:
    modules = (
        kvtier.v1.admin_pb2,
        kvtier.v1.blocks_pb2,
        kvtier.v1.caches_pb2,
        kvtier.v1.events_pb2,
        kvtier.v1.transfer_pb2,
    )
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    methods = {method.full_name: method for service in services for method in service.methods}
    assert set(NEEDS) == set(methods)
    field = {Over.ID: "cache_id", Over.NAME: "name"}
    for name, needs in NEEDS.items():
        request = methods[name].input_type
        if "header" in request.fields_by_name:
            request = request.fields_by_name["header"].message_type
        if needs.within is not None:
            request = request.fields_by_name[needs.within].message_type
        assert needs.over not in field or field[needs.over] in request.fields_by_name, name
        assert needs.forced is None or "force" in request.fields_by_name, name
