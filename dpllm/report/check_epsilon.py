"""Recompute ε of a run from its ledger, by another way than dpllm: `python check_epsilon.py [FOLDER]`.

Needs NumPy only, and shares no code with dpllm. Files: each line of the ledger has a hash of all lines before it; plan,
ledger and report name each other's hashes and agree in δ and the steps; each step has the plan's σ, q, C and B_max.
ε: a step is a pair (P, Q) of mixtures of normal distributions; its loss is log(P/Q) of an outcome of P. Outcomes are
cut into cells over which the loss changes by w at most, and each loss is split between two points of a grid of width w,
so that its mean stays (after arXiv:2106.02848). A Fourier transform adds up all losses, tilted by exp(θ loss) with the
θ of the moments accountant, so that δ may be 1e-12. By Hoeffding the sum is off by more than h with a probability of
δ/4000, so δ(ε) is between those found at ε + h and ε - h, less or plus δ/2000 and a bound of the float error. Discrete
noise and token draws have Rényi divergences only, so an upper bound; 1 % and 0.001 less is taken as the lower one.
Agrees: ε is at least the lower bound, and above the upper one by 2 % and two grid steps of the report at most (5 % with
discrete noise or several Rényi bounds). Exit code: 0 agrees, 1 differs, 2 cannot be checked: a file is missing, ε is
above 650, the best of several runs, distributed noise, thresholded counts, Rényi divergences beside other losses.
NOT checked: whether units were drawn, gradients clipped and noise added as the ledger says; who wrote the files (hashes
are no signatures: whoever redoes all of them is not found out); the words of the report; the files of the model.
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np

QUIET = ("run", "disclosure", "diagnostic", "fact", "open point", "settled", "public start", "released", "audit")
QUIET += ("adopted", "pages", "rate", "recovered", "score", "end")  # lines that charge nothing
NORMAL = ([0.0], [1.0])  # means and weights of a mixture: one normal distribution around 0


def require(holds, words, error=ValueError):
    """Files that contradict each other end here; with NotImplementedError, those that cannot be checked."""
    if not holds:
        raise error(words)


def read_ledger(data, plan_hash):
    """Return the starts [[event, count], …], the answers {kind of answer: count}, and the course of the run."""
    lines, whole = data.decode("ascii", errors="replace").removesuffix("\n").split("\n"), data.endswith(b"\n")
    chain, starts, answers = hashlib.sha256(b"dpllm privacy ledger, format 1").hexdigest()[:16], [], {}
    run = {"steps": 0, "torn": 0, "runs": 0, "seeded": False}
    for number, line in enumerate(lines, 1):
        where, body = f"ledger line {number}: ", line[:-30] + "}"  # without `, "chain": "0123456789abcdef"}`
        following = hashlib.sha256(f"{chain}{body}".encode("utf-8", errors="replace")).hexdigest()[:16]
        if line[-30:] == f', "chain": "{following}"}}':
            chain, event, count = following, json.loads(body), 1
            kind = event.pop("kind")
        else:  # half a line, after a crash, counts as a step unless it is certainly of another kind
            after = lines[number] if number < len(lines) else ""
            mended = after.startswith(f'{{"kind": "recovered", "line": {number}, ')
            require(mended or (number == len(lines) and not whole), where + "edited, or lines before it are lost")
            if line.startswith(tuple(f'{{"kind": "{one}"' for one in QUIET)) and '"charged": true' not in after:
                continue
            kind, event, count, run["torn"] = "torn", run["planned"], 1, run["torn"] + 1
        require(kind in (*QUIET, "step", "charge", "torn"), where + f"the unknown kind {kind!r}")
        if kind == "run":
            require(event["plan_hash"] == plan_hash, where + "a run of another plan")
            run |= {"planned": event["planned_step"], "allowed": event.get("num_steps"), "begins": True}
            run |= {"runs": run["runs"] + 1, "declared": False, "seeded": run["seeded"] or "NOT" in event["entropy"]}
        elif kind == "end":
            run["declared"] = event.get("independent") is True
        elif kind not in QUIET:
            if kind == "step":
                event = {name: value for name, value in event.items() if name not in ("rate", "threshold")}
                require((event.pop("step"), event) == (run["steps"], run["planned"]), where + "not the step planned")
            elif kind == "charge":
                key, count = json.dumps({**event, "count": 0}, sort_keys=True), event.pop("count")
                require(event.pop("name") and type(count) is int and count > 0, where + f"{count} answers")
                answers[key] = answers.get(key, 0) + count
            if not starts or starts[-1][0] != event or (run["begins"] and event["event"] in ("banded", "blt")):
                starts.append([event, 0])  # a resume begins new noise
            starts[-1][1] += count
            run |= {"steps": run["steps"] + count, "begins": False}
    return starts, answers, run


def stated_steps(plan, starts, answers, run):
    """Return [(event, count)] of which ε is stated: all that is planned, or what was charged before a declared stop."""
    taken, step, declared, planned = run["steps"], run["planned"], run["declared"], plan.get("num_steps")
    if "charges" in plan:  # answers of a query run, perhaps after a training run
        due = {json.dumps({**one, "count": 0}, sort_keys=True): one["count"] for one in plan["charges"]}
        known = all(count <= due.get(key, 0) for key, count in answers.items())
        require(known and sum(answers.values()) + run["torn"] == taken, "answers that are not the plan's")
        own = starts if declared and not run["torn"] else [(one, one["count"]) for one in plan["charges"]]
        return (plan["after"]["history"] if plan["after"] else []) + (own if taken else [])
    noise, rows = plan["noise"] if isinstance(plan["noise"], dict) else {"kind": plan["noise"]}, plan["num_examples"]
    kind, most = noise["kind"], None if rows else plan["max_batch_size"]
    if kind == "independent" and plan["randomness"] == "discrete":  # with a smaller B_max, more draws count as failures
        kind, most = "discrete poisson", min(most, step.get("max_batch_size") or most)
    elif kind == "independent":
        kind = "poisson rows" if rows and plan["max_rows_per_unit"] > 1 else "poisson"
    rate = noise.get("bands", 1) * plan["expected_batch_size"] / (rows or plan["num_units"])
    due = {**plan, **noise, "event": kind, "batch_size": plan["expected_batch_size"], "max_batch_size": most}
    due |= {"sampling_rate": 1.0 if kind == "blt" else min(1.0, rate), "rows_per_unit": plan["max_rows_per_unit"]}
    due["sensitivity"] = 1 + 2.0**-19 * (most or 0) + 2.0**-20 * plan["noise_multiplier"]
    names = {*step, "num_units", {"blt": "scale", "poisson rows": "rows_per_unit"}.get(kind, "max_batch_size")}
    wrong = [name for name in names if step.get(name) != due.get(name)]
    require(not wrong, f"steps have another {', '.join(wrong)} than the plan")
    require(not answers and taken <= planned, f"{taken} steps, and {planned} planned")
    require(plan["selection"] is None, "the best of several runs", NotImplementedError)
    left = 0 if declared or not taken else min(planned, run["allowed"] or planned) - taken
    split = [(step, count) for _, count in starts]
    if left:
        split += [(step, left)] if run["begins"] and kind in ("banded", "blt") else [(step, split.pop()[1] + left)]
    whole = [(step, taken if declared else planned)] if len(split) > 1 else split
    # Several starts may cost less than going on, and may have followed from the releases: the dearer is stated.
    costs = [sum(whole_shift(*one, False) for pair in each for one in rounds_of(*pair)) for each in (split, whole)]
    return whole if 0 < costs[0] * (1 + 1e-12) < costs[1] else split


def rounds_of(event, count):
    """Return [(round, count)]: independent rounds that cost as much as consecutive steps of an event."""
    if event["event"] == "banded":  # a unit is in one of b groups (arXiv:2306.08153)
        units, times = (-(-value // event["bands"]) for value in (event["num_units"], count))
        return [({**event, "event": "poisson", "num_units": units}, times)]
    if event["event"] == "blt":  # one Gaussian sum; a unit's steps are ⌊N/B⌋ apart (arXiv:2405.13763, theorem 2)
        visits, apart = -(-count * event["batch_size"] // event["num_units"]), event["num_units"] // event["batch_size"]
        parts = [w * d ** np.arange(count - 1) for d, w in zip(event["decays"], event["weights"], strict=True)]
        column = np.append(1.0, sum(parts))
        change = sum(np.append(np.zeros(at), column)[:count] for at in range(0, min(count, visits * apart), apart))
        sigma = event["noise_multiplier"] / (event["scale"] * math.sqrt((change**2).sum()))
        return [({"event": "poisson", "noise_multiplier": sigma, "sampling_rate": 1.0}, 1)]
    return [(event, count)]


def binomial(number, rate, least=0):
    """Return the likely values from `least` up, and their chances, of Binomial(number, rate)."""
    rate = min(rate, 1 - 1e-16)
    at = np.arange(least, min(number, int(max(least, number * rate) + 60 * math.sqrt(number * rate) + 2000)) + 1.0)
    first = math.lgamma(number + 1) - math.lgamma(least + 1) - math.lgamma(number - least + 1)
    logs = np.cumsum(np.log((number - at[:-1]) / (at[:-1] + 1)) + math.log(rate) - math.log1p(-rate))
    chances = np.exp(first + least * math.log(rate) + (number - least) * math.log1p(-rate) + np.append(0.0, logs))
    return at[chances > 1e-40], chances[chances > 1e-40]


def whole_shift(event, count, replace):
    """Return (shift/σ)² of rounds that are together one Gaussian sum over all units; 0: they are not."""
    cut = (event.get("max_batch_size") or math.inf) < (event.get("num_units") or 0)
    if event["event"] not in ("poisson", "poisson rows", "query") or event["sampling_rate"] < 1 or cut:
        return 0.0
    shift = event.get("replaced", 2.0) if replace else event.get("rows_per_unit", 1)
    return 0.0 if event.get("discrete") else count * (shift / event["noise_multiplier"]) ** 2


def pairs_of(event, replace):
    """Return, for each direction, [(weight, σ, P, Q)]: a public coin with these weights chooses a pair."""
    sigma, rate, units, most = (event[name] for name in ("noise_multiplier", "sampling_rate", "num_units", "most"))
    full, rare, moved = 0.0, [], binomial(event.get("rows_per_unit", 1), rate)
    if most and units and most < units:  # the others fill the batch: a unit may push another out (arXiv:2508.15089)
        full, over = (float(binomial(*one)[1].sum()) for one in ((units - 1, rate, most), (units, rate, most + 1)))
        pushed = binomial(1, min(1.0, over * most / full / units)) if over else NORMAL
        rare = [(full, sigma / 2, (-pushed[0], pushed[1]), pushed)] if over else []
    both = [((-moved[0], moved[1]), moved)] if replace else [(moved, NORMAL), (NORMAL, moved)]
    return [[(1 - full * len(rare), sigma, *sides), *rare] for sides in both]


def outcomes(pairs, reach, width):
    """Yield losses and masses of cells of outcomes over which the loss changes by a width at most."""
    for weight, sigma, *sides in pairs:

        def logs(x, sigma=sigma, sides=sides):  # of P and Q, but for the same factor of both
            terms = [[math.log(w) + (m * x - m * m / 2) / sigma**2 for m, w in zip(*one, strict=True)] for one in sides]
            return map(np.logaddexp.reduce, terms)

        low, high = min(sides[0][0]) - reach * sigma, max(sides[0][0]) + reach * sigma
        left, begins, ends, right = np.subtract(*logs(np.array([low, low + sigma / 99, high - sigma / 99, high])))
        slope = (abs(left - begins) + abs(right - ends)) * 99 / sigma  # at the two ends, where it is steepest
        step = (high - low) / (cells := math.ceil(max(4000, (high - low) * slope / width)))
        for begin in range(0, cells, 2**19):
            log_p, log_q = logs(x := low + step * (np.arange(begin, min(cells, begin + 2**19)) + 0.5))
            yield log_p - log_q, weight * step / sigma * np.exp(log_p - (x / sigma) ** 2 / 2) / math.sqrt(2 * math.pi)


def renyi_moments(event, count, replace, tilts):
    """Return (order - 1) times the Rényi divergence at each order - 1, and the probability of a failure."""
    kind, sigma, rate = event["event"], event["noise_multiplier"], event["sampling_rate"]
    if kind in ("query", "token draw"):  # zCDP (arXiv:2004.00010, 2004.07223)
        return tilts * (tilts + 1) * count * ((event.get("replaced", 2.0) if replace else 1.0) / sigma) ** 2 / 2, 0.0
    require(kind == "discrete poisson", f"events of the kind {kind!r}", NotImplementedError)
    found, sigma, units, most = tilts * np.inf, sigma / event["sensitivity"], event["num_units"], event["most"]
    for place in np.flatnonzero((tilts == np.floor(tilts)) & (tilts < 2048)):  # whole orders (arXiv:1908.10530)
        x, rest = np.arange(-12 * sigma, tilts[place] + 1 + 12 * sigma, sigma / 16), math.log1p(-min(rate, 1 - 1e-16))
        logs = (tilts[place] + 1) * np.logaddexp(rest, math.log(rate) + (x - 0.5) / sigma**2) - (x / sigma) ** 2 / 2
        found[place] = count * (np.logaddexp.reduce(logs) - math.log(16 * math.sqrt(2 * math.pi)))
    return found, count * binomial(units, rate, most + 1)[1].sum() if most and most < units else 0.0


def bounds_of(parts, bounded, delta, group):
    """Return bounds of the ε of a sum of losses; parts: (count, pairs); bounded: what is known by its moments only."""

    def moment(tilt, which=slice(None)):  # log E[exp(θ loss)]
        return sum(count * np.logaddexp.reduce(logs + tilt * losses) for count, losses, logs in rough[which])

    total, rough, guess, far = sum(part[0] for part in parts), [], 0.0, math.sqrt(2 * (60 - math.log(delta)))
    for count, pairs in parts:
        losses, masses = map(np.concatenate, zip(*outcomes(pairs, far, math.inf), strict=True))
        rough.append((count, losses, np.log(masses + 1e-300)))
    tilts = np.unique([*np.geomspace(3e-3, 1e8, 400), *range(1, 129), *range(136, 2048, 8)])
    bounded = [renyi_moments(*one, tilts) for one in bounded]
    moments = sum((one[0] for one in bounded), np.array([moment(tilt) for tilt in tilts]))
    failure = sum(one[1] for one in bounded)
    for _ in range(100):  # the moments accountant: the best θ, and a first upper bound (arXiv:2004.00010, prop. 12)
        share = delta / (1 + math.exp(min(guess, 700))) ** group - failure * (1 + math.exp(min(guess, 700)))
        firsts = (moments - math.log(max(share, 1e-300)) - np.log1p(tilts)) / tilts - np.log1p(1 / tilts)
        guess, tilt, scale = max(1e-9, firsts.min()), tilts[firsts.argmin()], moments[firsts.argmin()]
    require(not (parts and bounded), "Rényi divergences beside other losses", NotImplementedError)
    require(guess < 650, f"ε above 650 (at most {guess:.6g})", NotImplementedError)
    if bounded:
        return [max(0.0, 0.99 * guess - 1e-3) * (1 + group), guess * (1 + group)]
    log_rare = math.log(share / 4000)
    away = np.geomspace(1e-2, 1e3, 60) / guess  # Chernoff: all but exp(-40) of the mass is between first and last
    last = min((moment(tilt + s) - scale + 40) / s for s in away)
    first = -min((moment(tilt - s) - scale + 40) / s for s in away)
    width = max(0.003 * guess / math.sqrt(-2 * total * log_rare), (last - first) / 2**22)
    size, off = 2 ** math.ceil(math.log2((last - first) / width + 8)), width * math.sqrt(-2 * total * log_rare)  # h
    begin, spectrum, log_scale = math.floor(first / width), 1.0, 0.0
    for place, (count, pairs) in enumerate(parts):
        sums, scale = np.zeros(size), moment(tilt, slice(place, place + 1)) / count
        for losses, masses in outcomes(pairs, math.sqrt(2 * (math.log(total) - log_rare)), width):
            floor, share = np.floor(losses / width), losses / width % 1.0
            for at, kept in ((floor, masses * (1 - share)), (floor + 1, masses * share)):
                sums += np.bincount((at % size).astype(np.int64), kept * np.exp(tilt * width * at - scale), size)
        log_scale += count * (scale + math.log(sums.sum()))
        spectrum = spectrum * np.fft.rfft(sums / sums.sum()) ** count
    grid, sums = width * (begin + np.arange(size)), np.roll(np.fft.irfft(spectrum, size), -(begin % size))
    grid, sums = grid[grid > -off - width], sums[grid > -off - width]
    untilted = np.maximum(sums, 0) * np.exp(np.minimum(log_scale - tilt * grid, 700))
    above, less = (np.append(np.cumsum(one[::-1])[::-1], 0.0) for one in (untilted, untilted * np.exp(-grid)))
    bounds, epsilons = [], np.linspace(0.0, 1.02 * guess, 20001)
    for sign in (1, -1):  # δ found with h and all errors to one side
        at = epsilons + sign * off
        index = np.searchsorted(grid, at, side="right")
        error = 2 * math.exp(log_rare) + (total * 2.0**-50 + 2e-17) * np.exp(np.minimum(700, log_scale - tilt * at))
        found = np.maximum(0.0, above[index] - np.exp(at) * less[index]) - sign * error
        within = found * (1 + np.exp(epsilons)) ** group <= delta
        bounds.append(max(epsilons[~within], default=0.0) if sign > 0 else min(epsilons[within], default=math.inf))
    return [bound * (1 + group) for bound in bounds]


def recompute(steps, delta, replace):
    """Return a lower and an upper bound of ε of [(event, count)], and by what factor dpllm's may be above it."""
    rounds, parts, bounded, group = {}, [], [], False
    for event, count in (pair for step in steps for pair in rounds_of(*step)):
        event = {"num_units": None, **event, "clip_norm": 1, "most": event.get("max_batch_size")}
        key = json.dumps(event, sort_keys=True)
        rounds[key] = rounds.get(key, 0) + count
        pairless = "rows_per_unit" in event or "sensitivity" in event or event.get("replaced", 1) is None
        group = group or (replace and pairless)  # rows, rounded sums, and answers whose change is unknown
        if event["noise_multiplier"] == 0:
            return math.inf, math.inf, 1
    for event, count in ((json.loads(key), count) for key, count in rounds.items()):
        if shift := whole_shift(event, count, replace and not group):
            parts.append((1, [[(1.0, 1 / math.sqrt(shift), ([1.0], [1.0]), NORMAL)]]))
        elif event["event"] in ("poisson", "poisson rows"):
            parts.append((count, pairs_of(event, replace and not group)))
        else:
            bounded.append((event, count, replace and not group))
    sides = range(max([len(pairs) for _, pairs in parts] + [len(bounded) > 0]))
    each = [bounds_of([(n, pairs[side % len(pairs)]) for n, pairs in parts], bounded, delta, group) for side in sides]
    loose = len(bounded) > 1 or any("sensitivity" in one[0] for one in bounded)
    return *(max((one[place] for one in each), default=0.0) for place in (0, 1)), 1.05 if loose else 1.02


def check(folder):
    """Print what was read and found; ValueError: something differs; NotImplementedError: it cannot be checked."""
    plan, report = (json.loads((folder / f"privacy_{name}.json").read_text("utf-8")) for name in ("plan", "report"))
    data, read, hashes = (folder / "privacy_ledger.jsonl").read_bytes(), hashlib.sha256(), set()
    for line in data.splitlines(keepends=True):
        read.update(line)
        hashes.add(read.hexdigest())  # the report names one of them: lines were only added since
    plain = json.dumps({name: value for name, value in plan.items() if name != "hash"}, sort_keys=True)
    starts, answers, run = read_ledger(data, plan["hash"])
    statement, named, delta = report["statement"], report["checkable"], plan["delta"]
    stated, charged = statement["epsilon_by_adjacency"], report["accounting"]["parameters"]["num_steps_charged"]
    require(hashlib.sha256(plain.encode()).hexdigest() == plan["hash"] == named["plan_hash"], "the plan's hash")
    require(named["ledger_sha256"] in hashes, "the report is of another ledger, or of lines that it lost")
    require(statement["delta"] == delta, f"δ of the report is {statement['delta']}, and of the plan {delta}")
    require(len(named["runs"]) == run["runs"], "the run was begun again after the report: `dpllm report . --write`")
    require(charged == run["steps"], f"the report counts {charged} steps, and the ledger {run['steps']}")
    require(statement["epsilon"] == stated[plan["adjacency"]], "the report states several ε, or of another adjacency")
    require(not statement["private"] or not (run["seeded"] or plan.get("seeded")), "private with a fixed seed")
    steps, grid = stated_steps(plan, starts, answers, run), report["accounting"]["discretization"]
    print(f"read: {run['steps']} charged, {run['runs']} start(s), ε is of {sum(n for _, n in steps)}; δ = {delta}")
    for name, value in ((name, float(stated[name])) for name in ("zero-out", "replace-one")):
        low, high, slack = recompute(steps, delta, name == "replace-one")
        holds = low <= value <= max(1e-4, high * slack + 2 * grid) or value == math.inf  # 1e-4 is the least it states
        print(f"{name}: stated ε {value:.6g}, own bounds {low:.6g} to {high:.6g}:", "agrees" if holds else "DIFFERS")
        require(holds, f"ε under {name}")


if __name__ == "__main__":
    code, words = 0, "AGREES: the stated ε is that of the ledger"
    try:
        check(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    except (OSError, NotImplementedError, KeyError, TypeError, AttributeError) as error:
        code, words = 2, f"CANNOT BE CHECKED: {error if str(error) else type(error).__name__}"
    except ValueError as error:
        code, words = 1, f"DIFFERS: {error}"
    print(words, "NOT checked: " + __doc__.split("NOT checked: ")[1], sep="\n", end="")
    sys.exit(code)
