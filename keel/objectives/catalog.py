"""The presets: published objectives by name, each as a few lines of composition.

A preset is data without code, so two objectives that differ in one detail differ in one line here. docs/objectives.md
and `keel objectives` are generated from these tables, and `keel audit` verifies them numerically.
"""

from keel.objectives.preset import ObjectivePreset

RATIO_GATE = {"statistic": "ratio", "low": "$ratio_low", "high": "$ratio_high"}
CLIP = {"surrogate": "clip", "anchor": "$anchor", "eps": "$eps", "eps_high": "$eps_high"}
CLIP_ON_PROXIMAL = CLIP | {"anchor": "proximal"}
SEQUENCE_CLIP = CLIP | {"level": "sequence"}
CAPPED = {"surrogate": "linear", "ratio_cap": "$ratio_cap"}
CAP_NOTE = "The ratio is not capped by default. The authors' code caps it at 10 (ratio_cap = 10), verl at 3."
LOG_RATIO_PENALTY = {"estimator": "log_ratio_squared", "coef": "$kl_tau"}

_PRESETS = [
    ObjectivePreset(
        name="icepop",
        title="two-sided ratio mask",
        source="INTELLECT-3, arXiv 2512.16144, eq. 1",
        parameters={"ratio_low": 0.2, "ratio_high": 5.0, "rollout_min_ratio": None},
        parts={"gates": [RATIO_GATE, {"statistic": "ratio", "low": "$rollout_min_ratio", "scope": "sequence"}]},
    ),
    ObjectivePreset(
        name="ipo_kl",
        title="two-sided ratio mask with a squared log-ratio penalty on kept tokens",
        source="the mask of INTELLECT-3 and the KL of Kimi K2.5",
        parameters={"ratio_low": 0.2, "ratio_high": 5.0, "kl_tau": 1e-3},
        parts={"gates": [RATIO_GATE], "penalties": [LOG_RATIO_PENALTY]},
    ),
    ObjectivePreset(
        name="dppo_tv",
        title="probability-difference mask, independent of the advantage",
        source="symmetric DPPO-Binary-TV, arXiv 2602.04879",
        parameters={"diff_low": 0.2, "diff_high": 0.2},
        parts={"gates": [{"statistic": "probability_difference", "low": "-$diff_low", "high": "$diff_high"}]},
    ),
    ObjectivePreset(
        name="dppo_kl",
        title="probability-difference mask by the sign of A, with a squared log-ratio penalty on all tokens",
        source="DPPO-Binary-TV, arXiv 2602.04879, with a KL term",
        parameters={"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3, "ratio_cap": None},
        parts={
            "policy": CAPPED,
            "gates": [
                {"statistic": "probability_difference", "high": "$mask_high", "when": "positive_advantage"},
                {"statistic": "probability_difference", "low": "-$mask_low", "when": "negative_advantage"},
            ],
            "penalties": [LOG_RATIO_PENALTY | {"scope": "all"}],
        },
        note=CAP_NOTE,
    ),
    ObjectivePreset(
        name="opsm",
        title="off-policy sequence mask over a clipped surrogate",
        source="DeepSeek-V3.2, arXiv 2512.02556",
        parameters={"opsm_delta": 1e-4, "eps": 0.2, "eps_high": None, "anchor": "sampler"},
        parts={
            "gates": [{"statistic": "sequence_kl", "high": "$opsm_delta", "when": "negative_advantage"}],
            "policy": CLIP,
        },
    ),
    ObjectivePreset(
        name="ipo",
        title="absolute probability-difference mask with a squared log-ratio penalty on all tokens",
        source="prime-rl",
        parameters={"threshold": 0.1, "kl_tau": 1e-3},
        parts={
            "gates": [{"statistic": "probability_difference", "low": "-$threshold", "high": "$threshold"}],
            "penalties": [LOG_RATIO_PENALTY | {"scope": "all"}],
        },
    ),
    ObjectivePreset(
        name="reinforce",
        title="plain policy gradient, without a ratio",
        source="Williams 1992",
        parts={"policy": {"surrogate": "log_prob", "anchor": "none"}},
    ),
    ObjectivePreset(
        name="grpo",
        title="clipped surrogate, mean of sequence means",
        source="DeepSeekMath, arXiv 2402.03300",
        parameters={"eps": 0.2, "eps_high": None, "anchor": "sampler", "reduction": "sequences"},
        parts={"policy": CLIP},
        note="With reduction = tokens it equals dapo with eps_high = eps. The paper's KL term is reference_kl_coef.",
    ),
    ObjectivePreset(
        name="dapo",
        title="clipped surrogate with a higher upper bound, token mean",
        source="DAPO, arXiv 2503.14476",
        parameters={"eps": 0.2, "eps_high": 0.28, "anchor": "sampler"},
        parts={"policy": CLIP},
    ),
    ObjectivePreset(
        name="dr_grpo",
        title="clipped surrogate, constant denominator",
        source="Dr. GRPO, arXiv 2503.20783",
        parameters={"eps": 0.2, "eps_high": None, "anchor": "sampler", "reduction": "constant", "length": 1024},
        parts={"policy": CLIP},
        note="Set length to the maximum completion length.",
    ),
    ObjectivePreset(
        name="ppo",
        title="clipped surrogate with dual clip",
        source="PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729",
        parameters={"eps": 0.2, "eps_high": None, "dual_clip": 3.0, "anchor": "sampler"},
        parts={"policy": CLIP | {"dual_clip": "$dual_clip"}},
    ),
    ObjectivePreset(
        name="gspo",
        title="clipped sequence ratio",
        source="GSPO, arXiv 2507.18071",
        parameters={"eps": 3e-4, "eps_high": 4e-4, "anchor": "sampler", "reduction": "sequences"},
        parts={"policy": SEQUENCE_CLIP},
    ),
    ObjectivePreset(
        name="cispo",
        title="clamped ratio as a weight without gradient, times the log-prob",
        source="MiniMax-M1, arXiv 2506.13585",
        parameters={"ratio_low": None, "ratio_high": 5.0},
        parts={
            "weights": [{"low": "$ratio_low", "high": "$ratio_high"}],
            "policy": {"surrogate": "log_prob", "anchor": "none"},
        },
        note="The caps are ratios, not distances from one. A capped token still trains.",
    ),
    ObjectivePreset(
        name="tis",
        title="truncated importance sampling between sampler and proximal policy",
        source="Yao et al. 2025, truncated importance sampling for rollout-training mismatch",
        parameters={"level": "token", "cap": 2.0, "eps": 0.2, "eps_high": None},
        parts={
            "weights": [{"between": "proximal/sampler", "level": "$level", "high": "$cap"}],
            "policy": CLIP_ON_PROXIMAL,
        },
    ),
    ObjectivePreset(
        name="mis",
        title="masked importance sampling between sampler and proximal policy",
        source="Liu et al. 2025, masked importance sampling for rollout-training mismatch",
        parameters={"level": "token", "ratio_low": 0.5, "ratio_high": 2.0, "eps": 0.2, "eps_high": None},
        parts={
            "gates": [
                {
                    "statistic": "ratio",
                    "level": "$level",
                    "between": "proximal/sampler",
                    "low": "$ratio_low",
                    "high": "$ratio_high",
                }
            ],
            "weights": [{"between": "proximal/sampler", "level": "$level"}],
            "policy": CLIP_ON_PROXIMAL,
        },
        note="A token or sequence inside the band keeps its full importance weight.",
    ),
    ObjectivePreset(
        name="veto",
        title="sequence mask: drop a sequence if one of its tokens became almost impossible",
        source="verl, rollout correction",
        parameters={"rollout_min_ratio": 1e-4, "eps": 0.2, "eps_high": None, "anchor": "sampler"},
        parts={"gates": [{"statistic": "ratio", "low": "$rollout_min_ratio", "scope": "sequence"}], "policy": CLIP},
    ),
    ObjectivePreset(
        name="kpop",
        title="symmetric binary-KL mask",
        source="KPop",
        parameters={"phi": 0.5},
        parts={"gates": [{"statistic": "symmetric_binary_kl", "high": "$phi"}]},
    ),
    ObjectivePreset(
        name="dppo_binary_kl",
        title="binary-KL mask by the sign of the advantage",
        source="DPPO-Binary-KL, arXiv 2602.04879",
        parameters={"mask_low": 0.05, "mask_high": 0.05, "ratio_cap": None},
        parts={
            "policy": CAPPED,
            "gates": [
                {"statistic": "signed_binary_kl", "high": "$mask_high", "when": "positive_advantage"},
                {"statistic": "signed_binary_kl", "low": "-$mask_low", "when": "negative_advantage"},
            ],
        },
        note=CAP_NOTE,
    ),
    ObjectivePreset(
        name="m2po",
        title="drop the largest squared log-ratios until the mean of the rest is small",
        source="M2PO, arXiv 2510.01161",
        parameters={"tau": 0.04},
        parts={"gates": [{"statistic": "second_moment", "high": "$tau"}]},
        note="Decided over the step. Tokens with the same d^2 are dropped together.",
    ),
    ObjectivePreset(
        name="sapo",
        title="soft sigmoid gate in place of a clip",
        source="SAPO, arXiv 2511.20347",
        parameters={"tau_positive": 1.0, "tau_negative": 1.05, "anchor": "sampler", "reduction": "sequences"},
        parts={
            "policy": {
                "surrogate": "soft",
                "anchor": "$anchor",
                "tau_positive": "$tau_positive",
                "tau_negative": "$tau_negative",
            }
        },
    ),
    ObjectivePreset(
        name="gmpo",
        title="geometric mean of clipped token ratios",
        source="GMPO, arXiv 2507.20673",
        parameters={"token_clip": 0.4, "anchor": "sampler", "reduction": "sequences"},
        parts={
            "policy": {"surrogate": "linear", "anchor": "$anchor", "level": "sequence", "token_clip": "$token_clip"}
        },
    ),
    ObjectivePreset(
        name="luspo",
        title="clipped sequence ratio, each sequence weighted by its length",
        source="LUSPO, arXiv 2602.05261",
        parameters={"eps": 3e-4, "eps_high": 4e-4, "anchor": "sampler", "reduction": "constant", "length": 1},
        parts={"policy": SEQUENCE_CLIP},
    ),
    ObjectivePreset(
        name="vespo",
        title="gamma-shaped sequence weight without gradient, times the log-prob",
        source="VESPO, arXiv 2602.10693",
        parameters={
            "k_positive": 2.0,
            "rate_positive": 3.0,
            "k_negative": 3.0,
            "rate_negative": 2.0,
        },
        parts={
            "weights": [
                {
                    "level": "sequence",
                    "kernel": "gamma",
                    "k_positive": "$k_positive",
                    "rate_positive": "$rate_positive",
                    "k_negative": "$k_negative",
                    "rate_negative": "$rate_negative",
                }
            ],
            "policy": {"surrogate": "log_prob", "anchor": "none"},
        },
    ),
    ObjectivePreset(
        name="decoupled_ppo",
        title="clip around the proximal policy, importance weight from the sampler",
        source="Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298",
        parameters={"eps": 0.2, "eps_high": None, "cap": 5.0},
        parts={"weights": [{"between": "proximal/sampler", "high": "$cap"}], "policy": CLIP_ON_PROXIMAL},
    ),
    ObjectivePreset(
        name="decoupled_ppo_loglinear",
        title="decoupled PPO with the proximal policy interpolated by staleness",
        source="A-3PO, arXiv 2512.06547",
        parameters={"eps": 0.2, "eps_high": None, "cap": 5.0, "proximal": "interpolated"},
        parts={"weights": [{"between": "proximal/sampler", "high": "$cap"}], "policy": CLIP_ON_PROXIMAL},
    ),
    ObjectivePreset(
        name="on_policy_distillation",
        title="on-policy distillation: teacher log-prob minus policy log-prob as the advantage",
        source="Agarwal et al., arXiv 2306.13649",
        parameters={"adv_tau": 0.0, "teacher_tau": 1.0},
    ),
    ObjectivePreset(
        name="cross_entropy",
        title="maximum likelihood of the trainable tokens, or of those with the given roles",
        source="supervised fine-tuning",
        parts={"policy": {"surrogate": "cross_entropy", "anchor": "none"}},
    ),
]

PRESETS: dict[str, ObjectivePreset] = {preset.name: preset for preset in _PRESETS}
