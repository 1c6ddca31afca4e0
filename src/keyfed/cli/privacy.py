"""`keyfed privacy`: budgets, what they cost, what a run has spent, and whether its claim holds. torch comes late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from keyfed.cli.options import JsonOption, RunArgument, print_json
from keyfed.errors import ConfigError

privacy_app = typer.Typer(
    name="privacy", help="Differential privacy: epsilon, calibrate, plan, ledger, audit.", no_args_is_help=True
)

DeltaOption = Annotated[float, typer.Option(help="δ; below 1/population.")]
RoundsOption = Annotated[int, typer.Option(help="Releases, one a round.", min=0)]
SomeRoundsOption = Annotated[int, typer.Option("--rounds", help="Releases, one a round.", min=1)]
RateOption = Annotated[float, typer.Option(help="Chance q that a client is called in a round; 1: everybody, always.")]
PopulationOption = Annotated[int | None, typer.Option(help="Clients in all; a δ of 1/population or more is refused.")]
SeparationOption = Annotated[
    int | None,
    typer.Option(help="Tree aggregation: rounds a client waits between two. --rate is then not read.", min=1),
]


@privacy_app.command("epsilon")
def epsilon_(
    noise: Annotated[float, typer.Option(help="Noise multiplier z: standard deviation of the sum's noise / clip.")],
    rate: RateOption = 1.0,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    population: PopulationOption = None,
    separation: SeparationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the ε of that many noisy sums, by privacy loss distributions (PLD) and by Rényi divergences (RDP).

    Clients are drawn independently (Poisson); neighbours differ by one client. PLD is the tighter bound.

      keyfed privacy epsilon --noise 1 --rate 0.01 --rounds 1000 --delta 1e-5
    """
    from keyfed.private.dp.accounting import Release, Row, TreeRelease, epsilon

    rows: list[Row] = [Release(noise, rate, rounds) if separation is None else TreeRelease(noise, separation, rounds)]
    found: dict[str, Any] = {
        "pld": epsilon(rows, delta, population=population),
        "rdp": epsilon(rows, delta, "rdp", population=population),
        "noise": noise, "rate": rate if separation is None else None, "separation": separation, "rounds": rounds,
        "delta": delta, "unit": "client", "adjacency": "add or remove one",
    }  # fmt: skip
    if as_json:
        print_json(found)
    else:
        typer.echo(f"epsilon {found['pld']:.6g} (PLD), {found['rdp']:.6g} (RDP) at delta {delta:g}, client-level")


@privacy_app.command("calibrate")
def calibrate_(
    epsilon: Annotated[float, typer.Option(help="The budget ε.")],
    rate: RateOption = 1.0,
    rounds: SomeRoundsOption = 1,
    delta: DeltaOption = 1e-5,
    separation: SeparationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the noise multiplier z that a budget needs.

    keyfed privacy calibrate --epsilon 8 --rate 0.001 --rounds 2000 --delta 1e-6
    """
    from keyfed.private.dp import accounting

    least = None
    if separation is not None:
        z = accounting.calibrate_tree(epsilon, delta, separation, rounds)
        both = {"pld": z, "rdp": z}
    else:
        both = {
            "pld": accounting.calibrate(epsilon, delta, rate, rounds),
            "rdp": accounting.calibrate(epsilon, delta, rate, rounds, "rdp"),
        }
        if both["pld"] <= accounting.LEAST_NOISE:  # it costs less than the budget
            row = accounting.Release(both["pld"], rate, rounds)
            least = accounting.epsilon([row], delta, grid=accounting.COARSE)
    if as_json:
        inputs = {"epsilon": epsilon, "rate": rate, "rounds": rounds, "delta": delta, "epsilon_of_least_noise": least}
        print_json({**both, **inputs})
        return
    found = f"{both['pld']:.5g} (PLD), {both['rdp']:.5g} (RDP)"
    if least is not None:
        found = f"{both['pld']:.5g}, the least that is searched (epsilon {least:.3g}),"
    typer.echo(f"noise {found} for epsilon {epsilon:g} at delta {delta:g}")


@privacy_app.command("plan")
def plan_(
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; repeatable.  [default: 2, 8]")] = None,
    cohort: Annotated[
        list[int] | None, typer.Option(help="Clients in a round; repeatable.  [default: 100, 1000, 5000, 20000]")
    ] = None,
    population: Annotated[int, typer.Option(help="Clients in all.", min=2)] = 1_000_000,
    delta: Annotated[float | None, typer.Option(help="δ.  [default: population^-1.1]")] = None,
    rounds: SomeRoundsOption = 1000,
    parameters: Annotated[
        int, typer.Option(help="Parameters d of the model; the default is a tied GRU-300 of 10,000 words.", min=1)
    ] = 3_550_000,
    run: Annotated[
        list[Path] | None, typer.Option(help="A run trained with --dp, for the perplexity it cost there; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many clients a budget needs: noise, and how long it is beside the clip, z·√d/m.

    Above 1 the noise of a round is longer than the longest mean update. The count noise, in clients, is that of a clip
    that follows the clients, as it is by default: z pays for it, and the noise of the sum is up to 15.5 % longer for
    it. Perplexity is only printed where a run that is named has measured it.

      keyfed privacy plan --population 1000000 --epsilon 8 --run runs/private
    """
    from keyfed.private.dp.accounting import cohort_needed, delta_for, measured_costs, plan

    budgets, sizes = epsilon or [2.0, 8.0], cohort or [m for m in (100, 1000, 5000, 20_000) if m <= population]
    sizes = sizes or [population]
    delta = delta_for(population, delta)
    common: dict[str, Any] = {"population": population, "delta": delta, "rounds": rounds, "parameters": parameters}
    rows = plan(budgets, sizes, **common)
    needed = {f"{e:g}": cohort_needed(e, 1.0, **common) for e in budgets}
    results = {}
    for folder in run or []:
        from keyfed.run.folder import read_result, read_run_toml

        read_run_toml(folder)
        results[str(folder)] = read_result(folder) or {}
    costs = measured_costs(results)
    for name in results:
        if not any(row["run"] == name for row in costs):
            raise ConfigError(f"{name} has measured no cost of privacy; train it with --dp and privacy.twin")
    if as_json:
        print_json({**common, "rows": [r._asdict() for r in rows], "cohort_for_ratio_1": needed, "measured": costs})
        return
    from keyfed.run.console import render_table

    head = ["epsilon", "cohort", "rate", "noise z", "count noise", "z·√d/m"]
    table = [
        [f"{r.epsilon:g}", f"{r.cohort:,}", f"{r.rate:.2g}", f"{r.z:.3f}", f"{r.count_noise:,.4g}", f"{r.ratio:.2f}"]
        for r in rows
    ]
    typer.echo(
        f"{population:,} clients, delta {delta:.1e}, {rounds:,} rounds, {parameters:,} parameters (noise by RDP)\n"
        + render_table([head, *table]).rstrip()
    )
    for budget, size in needed.items():
        most = "even the whole population in every round is too little" if size is None else f"about {size:,} clients"
        typer.echo(f"noise no longer than the clip at epsilon {budget}: {most} a round")
    for row in costs:
        typer.echo(
            f"measured in {row['run']} ({row['verdict']}, epsilon {row['epsilon']:.3g}): perplexity "
            f"{row['perplexity']:.1f}, without clip and noise {row['noiseless']:.1f}"
        )
    if not costs:
        typer.echo("perplexity: not estimated; name a run trained with --dp (--run) for what it cost there")


@privacy_app.command("ledger")
def ledger_(run: RunArgument, as_json: JsonOption = False) -> None:
    """Print what a run has spent and what that means; a ledger that was touched prints nothing and is an error.

    keyfed privacy ledger runs/private
    """
    from keyfed.run.privacy import account_of_run

    account = account_of_run(run)
    if as_json:
        print_json(account)
        return
    spent = "∞" if account["pld"] is None else f"{account['pld']:.4g} (PLD), {account['rdp']:.4g} (RDP)"
    typer.echo(f"{account['verdict']}: epsilon {spent}")
    typer.echo("\n".join(account["statement"]))


@privacy_app.command("audit")
def audit_(
    run: RunArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer canaries and trials: minutes instead of hours.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Attack a run as an outsider would and compare with what it claims. Exit code 1 if the claim is contradicted.

    keyfed privacy audit runs/private
    """
    from keyfed.lab.audit.audit import audit_run
    from keyfed.run.console import Narrator

    with Narrator() as narrator:
        found = audit_run(run, quick=quick, listener=narrator)
    print_json(found) if as_json else typer.echo(audit_text(found, run))
    if found["contradicted"]:
        raise typer.Exit(1)


def audit_text(found: Mapping[str, Any], run: Path) -> str:
    """Write what an audit found for a terminal: what contradicts the claim, why the verdict is what it is."""
    levels = ("broken", "warning")
    seen = [f"{f['level']}: {f['check']}: {f['text']}" for f in found["findings"] if f["level"] in levels]
    against = [f"contradicted: {reason}" for reason in found["contradictions"]]
    stands = "the claim is contradicted" if against else "nothing that was measured contradicts the claim"
    return "\n".join([*against, *seen, *_attacked(found), f"{found['verdict']}: {stands}; see {run / 'audit.md'}"])


def _attacked(found: Mapping[str, Any]) -> Iterator[str]:
    """Say what the attacks found, whatever is claimed: a run that claims nothing is not contradicted by anything."""
    for cell in (found.get("canaries") or {}).get("cells", ()):
        yield (
            f"canaries of {cell['users']} clients, {cell['copies']} times in each: {cell['in_beam']} of "
            f"{cell['canaries']} found by a search, {cell['median']:.1f} bits of exposure at the median (chance: 1)"
        )
    for what, got in (found.get("membership") or {}).items():
        between = "{:.2f} to {:.2f}".format(*got["auc_interval"])
        yield f"membership of a {what}: AUC {got['auc']:.2f} ({between}; chance: 0.5)"
