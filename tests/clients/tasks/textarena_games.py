"""TextArena's games as rollgrid episodes, in TextArena's environment: groups of one game from one start.

The policy plays through the openai SDK, as it is; its opponent, where there is one, makes the first legal move.
    python textarena_games.py MODEL N CONCURRENCY
The last line of stdout is what each episode saw, by its session.
"""

import json
import re
import sys
import threading

import openai
import textarena
from rollgrid import Client, Session, run_episodes, to_arrays

GAMES = [("GuessTheNumber-v0-raw", 1, 3), ("TicTacToe-v0-raw", 2, 5)]
"""Name, players, seed."""

NUMBERS = [f"[{number}]" for number in range(1, 21)]
SEEDING = threading.Lock()
"""TextArena seeds Python's own generator."""


def legal(board: str, said: set[str]) -> list[str]:
    """What the policy may say: it is random, and a grammar keeps it to the rules.  On a board all that is free, else what is new."""
    moves = board.rpartition("Available Moves:")[2] if "Available Moves:" in board else ""
    return re.findall(r"\[\d+\]", moves) or [number for number in NUMBERS if number not in said]


def observe(env, player: int) -> str:
    """What the game says to the player since it last moved."""
    _, messages = env.get_observation()
    return "\n".join(text for source, text, _ in messages if source != player)


class Player:
    """The policy in one game: its conversation, and what each turn was made of."""

    def __init__(self, session: Session, model: str) -> None:
        self.client = openai.OpenAI(**session.openai())
        self.model = model
        self.messages: list[dict] = []
        self.said: set[str] = set()
        self.turns: list[dict] = []

    def move(self, observation: str) -> str:
        self.messages.append({"role": "user", "content": observation})
        completion = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=16, logprobs=True,
            extra_body={"structured_outputs": {"choice": legal(observation, self.said)}},
        )  # fmt: skip
        choice = completion.choices[0]
        self.messages.append({"role": "assistant", "content": choice.message.content})
        self.said.add(choice.message.content.strip())
        prompt = completion.prompt_token_ids
        self.turns.append({"prompt": prompt, "sampled": choice.token_ids, "session": completion.session})
        return choice.message.content


def play(session: Session, game: tuple[str, int, int]) -> float:
    name, players, seed = game
    env = textarena.make(name)
    with SEEDING:
        env.reset(num_players=players, seed=seed)
    policy, done = Player(session, MODEL), False
    while not done:
        player, _ = env.state.current_player_id, None
        seen = observe(env, player)
        done, _ = env.step(policy.move(seen) if player == 0 else legal(seen, set())[0])
    rewards, info = env.close()
    SEEN[session.id] = {"game": name, "reward": rewards[0], "reason": info[0]["reason"], "turns": policy.turns}
    return rewards[0]


MODEL, N, CONCURRENCY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SEEN: dict[str, dict] = {}

if __name__ == "__main__":
    with Client() as client:
        groups = run_episodes(client, GAMES, play, n=N, concurrency=CONCURRENCY, run="textarena", group="games")
    rows = to_arrays(groups)
    trained = int(rows["first"].sum())
    print(json.dumps({"groups": [group.id for group in groups], "episodes": SEEN, "trained": trained}))
