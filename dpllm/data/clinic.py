"""Two synthetic corpora of a clinic: notes about patients who do not exist, and leaflets for patients.

Place in the flow: read for the paths ``builtin:clinic`` and ``builtin:leaflets`` of a recipe. All text is made from the
templates below, always the same. It copies no document and describes no person. The notes have the shape of clinical
data (several notes of one patient, facts that return in all of them), so that a recipe with patients as units of
privacy runs without real notes. They are not fit to judge how well a model writes real ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

NUM_PATIENTS = 6000
NUM_LEAFLETS = 6000
_SEED = 20240311  # public: both corpora are the same on every machine

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Condition:
    """A chronic condition, with the phrases of its notes."""

    department: str
    complaints: tuple[str, ...]
    drugs: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, unit, doses from low to high
    findings: tuple[str, ...]
    checks: tuple[str, ...]
    advice: tuple[str, ...]


_CONDITIONS: dict[str, _Condition] = {
    "hypertension": _Condition(
        "Cardiology",
        ("headache in the morning", "high readings at home", "dizziness on standing", "swollen ankles"),
        (("ramipril", "mg", (2, 5, 10)), ("amlodipine", "mg", (5, 10)), ("hydrochlorothiazide", "mg", (12, 25))),
        ("heart sounds normal", "no oedema", "mild ankle oedema", "fundi normal"),
        ("potassium and creatinine", "home readings for a week", "a 24-hour measurement"),
        ("use less salt", "walk for half an hour on most days", "measure at the same time each day"),
    ),
    "atrial fibrillation": _Condition(
        "Cardiology",
        ("palpitations at night", "an irregular pulse", "shortness of breath on stairs", "tiredness"),
        (("apixaban", "mg", (2, 5)), ("bisoprolol", "mg", (2, 5, 10))),
        ("pulse irregular, no murmur", "rate controlled", "lungs clear"),
        ("an ECG", "a blood count", "an echocardiogram"),
        ("ask before you stop the blood thinner", "report any unusual bleeding"),
    ),
    "heart failure": _Condition(
        "Cardiology",
        ("shortness of breath when lying flat", "weight gain over a few days", "swollen legs", "a dry cough at night"),
        (("furosemide", "mg", (20, 40, 80)), ("spironolactone", "mg", (12, 25)), ("carvedilol", "mg", (6, 12, 25))),
        ("fine crackles at both bases", "oedema to the knees", "neck veins not raised"),
        ("electrolytes", "an echocardiogram", "daily weights"),
        ("weigh yourself every morning", "call if you gain two kilograms in three days"),
    ),
    "type 2 diabetes": _Condition(
        "Endocrinology",
        ("thirst and frequent urination", "tingling feet", "low sugars before lunch", "blurred vision"),
        (
            ("metformin", "mg", (500, 850, 1000)),
            ("empagliflozin", "mg", (10, 25)),
            ("insulin glargine", "units", (10, 18)),
        ),
        ("monofilament felt in all places", "feet dry, no ulcer", "reduced feeling in both feet"),
        ("HbA1c", "urine albumin", "an eye examination"),
        ("check your feet every evening", "carry some sugar with you", "eat at regular times"),
    ),
    "hypothyroidism": _Condition(
        "Endocrinology",
        ("tiredness and feeling cold", "dry skin", "weight gain", "constipation"),
        (("levothyroxine", "micrograms", (50, 75, 100)),),
        ("thyroid not enlarged", "skin dry, pulse slow", "reflexes slow"),
        ("TSH", "TSH and free T4"),
        ("take the tablet before breakfast", "keep iron tablets four hours apart"),
    ),
    "asthma": _Condition(
        "Pulmonology",
        ("wheeze at night", "cough after running", "chest tightness in cold air", "a cold that went to the chest"),
        (("budesonide", "micrograms", (200, 400)), ("salbutamol", "puffs", (1, 2)), ("montelukast", "mg", (5, 10))),
        ("scattered wheeze", "chest clear", "peak flow below the best value"),
        ("spirometry", "inhaler technique", "a peak flow diary"),
        ("rinse your mouth after the inhaler", "keep the reliever in your pocket"),
    ),
    "COPD": _Condition(
        "Pulmonology",
        ("more sputum than usual", "shortness of breath at rest", "a cough every morning", "poor sleep from coughing"),
        (("tiotropium", "micrograms", (5, 10)), ("formoterol", "micrograms", (6, 12)), ("prednisolone", "mg", (5, 20))),
        ("breath sounds quiet", "long expiration", "a few coarse crackles"),
        ("oxygen saturation", "spirometry", "a chest film"),
        ("stop smoking, with help if you want it", "get the yearly influenza vaccine"),
    ),
    "migraine": _Condition(
        "Neurology",
        ("headache with nausea", "flickering lights before the pain", "four attacks this month", "pain behind one eye"),
        (("sumatriptan", "mg", (50, 100)), ("propranolol", "mg", (40, 80)), ("topiramate", "mg", (25, 50))),
        ("cranial nerves normal", "no neck stiffness", "neurological examination normal"),
        ("a headache diary", "pressure before the next dose"),
        ("rest in a dark room", "sleep at regular hours", "note what comes before an attack"),
    ),
    "depression": _Condition(
        "Psychiatry",
        ("low mood and early waking", "no interest in friends", "poor appetite", "trouble concentrating at work"),
        (("sertraline", "mg", (50, 100)), ("mirtazapine", "mg", (15, 30))),
        ("calm, speaks slowly", "mood low, no thoughts of self-harm", "brighter than last time"),
        ("the questionnaire", "sleep diary", "sodium"),
        ("plan one pleasant thing a day", "ask before you stop the tablets"),
    ),
    "osteoarthritis": _Condition(
        "Rheumatology",
        ("knee pain on stairs", "stiff hands in the morning", "hip pain at night", "a swollen knee after gardening"),
        (("paracetamol", "mg", (500, 1000)), ("naproxen", "mg", (250, 500))),
        ("crepitus in both knees", "hip rotation limited", "small effusion, no redness"),
        ("a knee film", "kidney function"),
        ("strengthen the thigh muscles", "use a stick on the other side"),
    ),
    "gout": _Condition(
        "Rheumatology",
        ("a hot painful big toe", "a swollen ankle since the weekend", "two attacks this year"),
        (("allopurinol", "mg", (100, 200, 300)), ("colchicine", "mg", (1, 2))),
        ("first toe joint red and tender", "no tophi", "joints quiet today"),
        ("uric acid", "kidney function"),
        ("drink enough water", "eat less red meat and drink less beer"),
    ),
    "reflux disease": _Condition(
        "Gastroenterology",
        ("heartburn after meals", "an acid taste at night", "pain behind the breastbone", "hoarseness in the morning"),
        (("omeprazole", "mg", (20, 40)), ("famotidine", "mg", (20, 40))),
        ("abdomen soft", "mild tenderness above the navel", "weight stable"),
        ("an endoscopy", "a blood count"),
        ("eat the last meal three hours before bed", "raise the head of the bed"),
    ),
    "iron deficiency": _Condition(
        "Gastroenterology",
        ("tiredness on exertion", "pale skin", "restless legs in the evening", "hair loss"),
        (("iron sulfate", "mg", (100, 200)),),
        ("conjunctivae pale", "spleen not felt", "no bruises"),
        ("ferritin", "a blood count and ferritin"),
        ("take iron with orange juice", "expect dark stools"),
    ),
    "chronic kidney disease": _Condition(
        "Nephrology",
        ("itching skin", "poor appetite", "swollen eyelids in the morning", "cramps at night"),
        (("ramipril", "mg", (2, 5)), ("sodium bicarbonate", "mg", (500, 1000)), ("furosemide", "mg", (40, 80))),
        ("no oedema", "pressure above target", "skin scratched at the arms"),
        ("creatinine and potassium", "urine albumin", "phosphate"),
        ("avoid painkillers such as ibuprofen", "ask before you take any new medicine"),
    ),
}
_JOBS = (
    *("teacher", "bus driver", "nurse", "farmer", "cook", "carpenter", "accountant", "electrician", "gardener"),
    *("baker", "librarian", "welder", "painter", "postman", "cleaner", "engineer", "tailor", "musician"),
)
_HOMES = ("alone", "with a partner", "with a daughter", "with two children", "with parents", "in a care home")
_ALLERGIES = ("penicillin", "nuts", "latex", "aspirin", "pollen", "iodine contrast")
_KINDS = ("follow-up", "follow-up", "home visit", "unplanned visit", "yearly check")
_SPANS = ("two days", "three days", "a week", "ten days", "two weeks", "a month", "six weeks")


class _Draws:
    """Draws of one fixed sequence: only ``random()``, which is the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def one(self, values: Sequence[_Value]) -> _Value:
        return values[self.below(len(values))]

    def some(self, values: Sequence[_Value], count: int) -> list[_Value]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]

    def happens(self, share: float) -> bool:
        return self._random.random() < share

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)


def notes() -> list[dict[str, Any]]:
    """Return 30 000 notes of `NUM_PATIENTS` patients: ``{"patient_id", "visit", "department", "header", "note"}``.

    ``header`` is what a system knows before the note is written: department, kind of visit, age, sex, conditions.
    """
    return [record for number in range(NUM_PATIENTS) for record in _notes_of(number, _Draws(_SEED * 10_000 + number))]


def _notes_of(number: int, draws: _Draws) -> list[dict[str, Any]]:
    """Return the notes of one patient, whose facts are the same in all of them."""
    woman, age = draws.happens(0.5), draws.between(22, 88)
    names = draws.some(sorted(_CONDITIONS), 1 + draws.below(3))
    doses = {}
    for name in names:
        drug = draws.one(_CONDITIONS[name].drugs)
        doses[name] = (drug, draws.below(len(drug[2])))
    facts = [
        draws.one(("Works as a {}.", "Is a {}.", "Retired {}.")).format(draws.one(_JOBS)),
        f"Lives {draws.one(_HOMES)}.",
    ]
    if draws.happens(0.4):
        facts.append(f"Allergic to {draws.one(_ALLERGIES)}.")
    weight, visits = draws.between(52, 104), 2 + draws.below(7)
    found = []
    for visit in range(visits):
        name = draws.one(names)
        kind = "first visit" if visit == 0 else draws.one(_KINDS)
        known = ", ".join(names)
        department = _CONDITIONS[name].department
        header = (
            f"{department}, {kind}. {'Woman' if woman else 'Man'}, {age + visit // 3} years. Known: {known}. Note: "
        )
        text = _note(draws, name, doses, draws.one(facts), weight)
        fields = {"patient_id": f"P{number:05d}", "visit": visit + 1, "department": department}
        found.append({**fields, "header": header, "note": text})
        weight += draws.between(-2, 2)
    return found


def _note(draws: _Draws, name: str, doses: dict[str, Any], fact: str, weight: int) -> str:
    """Return the text of a visit; a dose that is raised stays raised at the next visit."""
    about, (drug, level) = _CONDITIONS[name], doses[name]
    span = draws.one(_SPANS)
    complaint = draws.one(about.complaints)
    opening = draws.one(
        (
            f"Reports {complaint} for {span}.",
            f"Comes because of {complaint}, since {span}.",
            f"Still has {complaint}.",
            f"Has had {complaint} again, for {span}, less than before.",
            "Feels well and has no complaints.",
        )
    )
    dose = f"{drug[0]} {drug[2][level]} {drug[1]}"
    takes = draws.one((f"Takes {dose} daily.", f"On {dose}, takes it regularly.", f"Forgets {dose} now and then."))
    vitals = draws.one(
        (
            f"Pressure {draws.between(108, 172)}/{draws.between(62, 98)}, pulse {draws.between(54, 104)}.",
            f"Weight {weight} kg, pressure {draws.between(108, 172)}/{draws.between(62, 98)}.",
            f"Pulse {draws.between(54, 104)}, temperature 36.{draws.below(10)}.",
        )
    )
    finding = f"On examination {draws.one(about.findings)}."
    if level + 1 < len(drug[2]) and draws.happens(0.3):
        doses[name] = (drug, level + 1)
        plan = f"Plan: raise {drug[0]} to {drug[2][level + 1]} {drug[1]}, check {draws.one(about.checks)}."
    else:
        plan = draws.one(
            (
                f"Plan: continue {drug[0]}, check {draws.one(about.checks)}.",
                f"Plan: no change. Advised to {draws.one(about.advice)}.",
                f"Plan: order {draws.one(about.checks)}.",
            )
        )
    review = draws.one(("Review in {} weeks.", "See again in {} weeks.", "Back in {} weeks.")).format(
        draws.between(2, 12)
    )
    middle = [takes, vitals, finding]
    if draws.happens(0.5):
        middle.insert(0, fact)
    return " ".join([opening, *middle, plan, review])


def leaflets() -> list[dict[str, Any]]:
    """Return the leaflets: ``{"text"}``, `NUM_LEAFLETS` short texts that explain a condition and a medicine."""
    draws = _Draws(_SEED)
    return [{"text": _leaflet(draws)} for _ in range(NUM_LEAFLETS)]


def _leaflet(draws: _Draws) -> str:
    name = draws.one(sorted(_CONDITIONS))
    about = _CONDITIONS[name]
    drug = draws.one(about.drugs)
    first, second = draws.some(about.complaints, 2)
    advice = draws.some(about.advice, 2)
    sentences = [
        draws.one(
            (
                f"People with {name} often notice {first}.",
                f"{name.capitalize() if name != 'COPD' else name} can cause {first} or {second}.",
                f"Typical signs of {name} are {first} and {second}.",
            )
        ),
        draws.one(
            (
                f"Many patients take {drug[0]}, usually {drug[2][0]} to {drug[2][-1]} {drug[1]} a day.",
                f"Your doctor may start {drug[0]} with {drug[2][0]} {drug[1]} and raise it slowly.",
                f"The usual dose of {drug[0]} is {draws.one(drug[2])} {drug[1]}.",
            )
        ),
        draws.one(
            (
                f"At the {about.department.lower()} department we check {draws.one(about.checks)}.",
                f"Once or twice a year we look at {draws.one(about.checks)}.",
                f"Before your visit we may ask for {draws.one(about.checks)}.",
            )
        ),
        draws.one((f"It helps to {advice[0]}.", f"We ask you to {advice[-1]}.", f"Please {advice[0]}.")),
        draws.one(
            (
                f"Call your doctor if you have {second} for more than {draws.one(_SPANS)}.",
                f"A pressure of {draws.between(110, 140)}/{draws.between(65, 90)} and a pulse of "
                f"{draws.between(58, 90)} are normal.",
                f"The next visit is in {draws.between(2, 12)} weeks.",
            )
        ),
    ]
    sentences.append(_about_visits(draws))
    kept = draws.some(range(len(sentences)), 3 + draws.below(4))
    return " ".join(sentences[place] for place in sorted(kept))


def _about_visits(draws: _Draws) -> str:
    """Return a sentence of a leaflet about visits in general."""
    job, kind, department = draws.one(_JOBS), draws.one(_KINDS), draws.one([*_CONDITIONS.values()]).department
    return draws.one(
        (
            f"At a first visit we ask whether you work, such as a {job}, and whether you live {draws.one(_HOMES)}.",
            f"Tell us before any examination if you are allergic to {draws.one(_ALLERGIES)}.",
            f"{department}, {kind}: bring a list of all that you take daily, regularly or now and then.",
            f"A {kind} has a plan: whether to continue, to change or to order something, and when to review it.",
            f"Your weight in kg, your pulse and your temperature (36.{draws.below(10)} is normal) are in your note.",
            f"The woman or man at the desk of {department} has known most patients for years.",
            f"Patients who feel well and have no complaints since {draws.one(_SPANS)} are seen again in "
            f"{draws.between(2, 12)} weeks, others come back because they still have them.",
            f"A retired {job} reports: “I was advised to come again, and had less of it than before.”",
        )
    )
