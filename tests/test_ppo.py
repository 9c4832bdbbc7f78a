"""PPO against known answers: advantages by brute force, log-probabilities by SciPy, learning on probe worlds."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.envs.base import Env, State
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import norm

from rlnb.tracker.ppo import Distribution, Learner, PPOConfig, advantages, make_train, merge_statistics

numbers = st.floats(-5, 5, width=32)


@given(arrays(np.float32, (6, 3), elements=numbers), arrays(np.float32, (6, 3), elements=numbers), arrays(np.float32, 3, elements=numbers),
       arrays(np.int8, (6, 3), elements=st.integers(0, 2)), st.floats(0.5, 0.999), st.floats(0.0, 1.0))
@settings(max_examples=60)
def test_advantages_by_brute_force(reward, value, last, ends, gamma, lam):
    "Against the definition, term by term: sum over l of (gamma lambda)^l times the surprise, until an end."
    done, truncated = (ends > 0).astype(np.float32), (ends == 2).astype(np.float32)
    following = np.concatenate([value[1:], last[None]])
    expected = np.zeros((6, 3))
    for env in range(3):
        for t in range(6):
            total, fade = 0.0, 1.0
            for k in range(t, 6):
                if not truncated[k, env]:
                    total += fade * (reward[k, env] + gamma * (1 - done[k, env]) * following[k, env] - value[k, env])
                if done[k, env]:
                    break
                fade *= gamma * lam
            expected[t, env] = total
    np.testing.assert_allclose(advantages(reward, value, last, done, truncated, gamma, lam), expected, atol=2e-4)


def test_with_lambda_one_the_target_is_the_discounted_return():
    reward = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    value, zero = np.ones((50, 4), np.float32), np.zeros((50, 4), np.float32)
    target = advantages(reward, value, np.zeros(4, np.float32), zero, zero, 0.9, 1.0) + value
    returns = [sum(0.9**k * reward[t + k, 0] for k in range(50 - t)) for t in range(50)]
    np.testing.assert_allclose(target[:, 0], returns, rtol=1e-4, atol=1e-4)


class Nothing(Env):
    observation_size, action_size, backend = 3, 2, "none"

    def reset(self, rng):
        raise NotImplementedError

    def step(self, state, action):
        raise NotImplementedError


@given(arrays(np.float32, 2, elements=st.floats(-2, 2, width=32)), arrays(np.float32, 2, elements=st.floats(-1.5, 0.5, width=32)),
       arrays(np.float32, 2, elements=st.floats(-3, 3, width=32)))
@settings(max_examples=60)
def test_log_probabilities_are_those_of_scipy(location, log_std, raw):
    gaussian = norm.logpdf(raw.astype(np.float64), location.astype(np.float64), np.exp(log_std.astype(np.float64))).sum()
    clipped = Learner(Nothing(), PPOConfig(distribution=Distribution.clipped_gaussian))
    np.testing.assert_allclose(clipped.log_prob(location, log_std, raw), gaussian, rtol=1e-4, atol=1e-4)
    squashed = gaussian - np.log(1 - np.tanh(raw.astype(np.float64)) ** 2).sum()
    np.testing.assert_allclose(Learner(Nothing()).log_prob(location, log_std, raw), squashed, rtol=1e-4, atol=1e-3)


def test_statistics_merge_as_if_seen_at_once():
    learner, rng = Learner(Nothing()), np.random.default_rng(0)
    policy, seen = learner.init_policy(jax.random.key(0)), []
    for scale in (1.0, 5.0, 0.2):
        seen.append(rng.normal(scale, scale, (200, 3)).astype(np.float32))
        policy = merge_statistics(policy, jnp.array(seen[-1]), 1e9)
    everything = np.concatenate(seen)
    np.testing.assert_allclose(policy.mean, everything.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(policy.variance, everything.var(axis=0), rtol=1e-3)


class Identity(Env):
    "Pays for an action equal to the observation; episodes of four steps, half of which are cut off and half end."

    observation_size, action_size, backend, n = 1, 1, "none", 128

    def reset(self, rng, families=None):
        n = self.n
        return State(None, jax.random.uniform(rng, (n, 1), minval=-0.8, maxval=0.8), jnp.zeros(n), jnp.zeros(n, bool), {},
                     {"key": rng, "time": jnp.arange(n) % 4, "truncation": jnp.zeros(n, bool)})

    def step(self, state, action):
        key, draw = jax.random.split(state.info["key"])
        time = state.info["time"] + 1
        done = time % 4 == 0
        reward = 1 - jnp.abs(action[:, 0] - state.obs[:, 0])
        return state.replace(obs=jax.random.uniform(draw, (self.n, 1), minval=-0.8, maxval=0.8), reward=reward, done=done,
                             info={"key": key, "time": time, "truncation": done & (jnp.arange(self.n) % 2 == 0)})


@pytest.mark.parametrize("distribution", Distribution)
def test_learns_the_identity(distribution):
    "Both distributions reach 95 % of what can be had, explain the returns, and keep their log-probabilities consistent."
    config = PPOConfig(unroll=16, minibatches=4, learning_rate=3e-3, gamma=0.5, smoothness=0.0, distribution=distribution)
    learner, init, train = make_train(Identity(), config, updates=150)
    state, report = train(init(jax.random.key(1)), None, jnp.float32(config.learning_rate))
    assert float(report["reward"][-1]) > 0.95 > float(report["reward"][0])
    assert float(report["log_prob_error"].max()) < 1e-5
    asked = jnp.linspace(-0.7, 0.7, 9)[:, None]
    np.testing.assert_allclose(learner.act(state.policy, asked), asked, atol=0.1)
    assert float(state.policy.log_std[0]) < -1.0  # it has become sure of itself
    assert int(state.steps) == 150 * 16 * 128


def test_one_program_for_all_stages():
    "Other families and another learning rate do not compile again, and neither does the state that comes out."
    _, init, train = make_train(Identity(), PPOConfig(unroll=4, minibatches=2), updates=2)
    state = init(jax.random.key(0))
    for rate in (1e-3, 1e-4, 0.0):
        state, _ = train(state, None, jnp.float32(rate))
    assert train._cache_size() == 1


def test_equal_seeds_give_equal_policies():
    def policy(seed):
        _, init, train = make_train(Identity(), PPOConfig(unroll=4, minibatches=2), updates=3)
        return train(init(jax.random.key(seed)), None, jnp.float32(1e-3))[0].policy

    one, same, other = (jax.tree.leaves(policy(seed)) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, same)) and not all((a == b).all() for a, b in zip(one, other))
