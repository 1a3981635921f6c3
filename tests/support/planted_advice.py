"""A planted advice: an answer to a race of planted curves, with everything that an advice may hold."""

from __future__ import annotations

from support.planted_races import Planted, PlantedField

from gossamer.plan.advise.advice_file import Advice, CandidateRow, ConfirmedRow
from gossamer.plan.advise.advisor import whole_advice
from gossamer.plan.advise.answer import Setting, answer
from gossamer.plan.advise.candidates import GradientFinding
from gossamer.plan.advise.curves import read_target
from gossamer.plan.advise.race import Race
from gossamer.plan.advise.thresholds import LeadRange

RECIPES = {
    "Dense()": Planted(step_seconds=1.0, bytes_per_step=13e6),
    "Int8()": Planted(step_seconds=0.5, bytes_per_step=3.4e6),
    "Float4()": Planted(step_seconds=0.32, efficiency=0.98, bytes_per_step=1.7e6),
    "TopK(density=0.01)": Planted(step_seconds=0.25, efficiency=0.8, bytes_per_step=3e5),
    "PowerSGD(rank=4)": Planted(step_seconds=0.3, efficiency=0.85, bytes_per_step=4e5),
    "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Float4()": Planted(
        step_seconds=0.21, efficiency=0.9, bytes_per_step=9e4
    ),
    "LocalSGD(period=8) + Int8()": Planted(step_seconds=0.24, efficiency=0.7, bytes_per_step=4.3e5),
    "OneBit()": Planted(step_seconds=0.27, efficiency=0.6, bytes_per_step=4.2e5),
    "DGC(density=0.001)": Planted(step_seconds=0.24, fails_at=150, bytes_per_step=4e4),
    "TernGrad()": Planted(step_seconds=0.29, efficiency=0.5, bytes_per_step=8e5),
}


def planted_advice(seed: int = 0, budget: float = 8000.0) -> Advice:
    field, target = PlantedField(RECIPES, seed), read_target("loss<2.0")
    names = [name for name in RECIPES if name != "Dense()"]
    found = Race(
        start=field.start, baseline="Dense()", challengers=names, budget_seconds=budget, target=target, now=field.now
    ).run()
    setting = Setting(script="train.py", arguments=["--lr", "0.1"], workers=4, network="20mbit,20ms", target=target)
    said = answer(found, setting, [LeadRange(of="rate", recipe="Dense()", above=400e6, below=None)])
    candidates = [
        CandidateRow(
            recipe=name,
            step_seconds=each.step_seconds,
            bytes_sent=each.bytes_per_step,
            memory_bytes=13_229_056,
            expected_steps=1 / each.efficiency,
            step_seconds_low=0.9 * each.step_seconds,
            step_seconds_high=1.2 * each.step_seconds,
        )
        for name, each in RECIPES.items()
    ]
    candidates.append(
        CandidateRow(recipe="Sharded(Dense())", excluded="dominated by Dense(): as many bytes & more <seconds>")
    )
    confirmed = [
        ConfirmedRow(recipe="Int8()", estimated_step_seconds=0.5, measured_step_seconds=0.55, steps=40, loss=2.31)
    ]
    gradients = {"largest_hundredth": 0.31, "sign_agreement": 0.53, "noise_scale_batches": 12.0, "signal_energy": None}
    findings = [GradientFinding(family="few entries", works=True, because="a hundredth holds 31% of the energy")]
    return whole_advice(
        found,
        said,
        setting,
        candidates=candidates,
        compute_seconds=0.2,
        gradients=gradients,
        findings=findings,
        confirmed=confirmed,
    )
