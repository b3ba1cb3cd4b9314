"""The transitions of a session's fold in Redis, each one Lua script over keys of one hash tag.

Fields of `keys.session`: `opened` (packed `SessionOpened`), `gen` (who made this hash), `at` (RG_SAMPLES sequence folded to), `next` (the next turn's number), `last` (UNIX second of the
last turn), `ended` (packed `SessionEnded`), `ending` (UNIX second at which somebody began to end it), `closed` (its group
was found closed), and one field each: `n:<turn>:<seq>` node, `l:<turn>:<seq>` lost turn, `f:<branch>:<seq>` fork,
`o:<turn>` open turn (JSON), `d:<turn>` its RG_JOBS sequence, `b:<branch>` branch whose fork is being published.

A script never makes the hash but `INSTALL`: one that is gone is rebuilt from the stream, never begun again from nothing.
Every script may run twice with the same arguments and answers the same.
"""

from __future__ import annotations

LOAD = """
-- ARGV: generation and sequence the caller has pieces of.  All fields but the pieces it has; nothing = gone.
local known = 0
if redis.call('HGET', KEYS[1], 'gen') == ARGV[1] then known = tonumber(ARGV[2]) end
local wanted = {}
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  local seq = string.match(name, '^[nlf]:.*:(%d+)$')
  if not seq or tonumber(seq) > known then wanted[#wanted + 1] = name end
end
local found = {}
for first = 1, #wanted, 500 do
  local names = {}
  for i = first, math.min(first + 499, #wanted) do names[#names + 1] = wanted[i] end
  for i, value in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
    found[#found + 1] = names[i]
    found[#found + 1] = value
  end
end
return found
"""

INSTALL = """
-- KEYS: hash, lock.  ARGV: lock token ('' = nobody else can know the session yet), TTL, fields and values.
if ARGV[1] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'lost' end
local made = 'there'
if redis.call('EXISTS', KEYS[1]) == 0 then
  for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  redis.call('EXPIRE', KEYS[1], ARGV[2])
  made = 'ok'
end
if ARGV[1] ~= '' then redis.call('DEL', KEYS[2]) end
return made
"""

DROP = """
-- ARGV: generation.  A hash that cannot be read is rebuilt.
if (redis.call('HGET', KEYS[1], 'gen') or '') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 'ok'
"""

FOLD = """
-- ARGV: gen, at before, TTL, turns that ended (comma), branches now forked (comma), lowest next turn, last, fields and values.
if redis.call('EXISTS', KEYS[1]) == 0 then return 'gone' end
if redis.call('HGET', KEYS[1], 'gen') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'at') ~= ARGV[2] then return 'moved' end
for turn in string.gmatch(ARGV[4], '[^,]+') do redis.call('HDEL', KEYS[1], 'o:' .. turn, 'd:' .. turn) end
for branch in string.gmatch(ARGV[5], '[^,]+') do redis.call('HDEL', KEYS[1], 'b:' .. branch) end
for i, name in ipairs({'next', 'last'}) do
  local value = ARGV[5 + i]
  if tonumber(redis.call('HGET', KEYS[1], name)) < tonumber(value) then redis.call('HSET', KEYS[1], name, value) end
end
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 'ok'
"""

_ALIVE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
if redis.call('HEXISTS', KEYS[1], 'ended') == 1 or redis.call('HEXISTS', KEYS[1], 'closed') == 1 then return {'ended'} end
"""

_OPEN_TURNS = """
local function open_turns(now)
  local live = {}
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    local turn = string.match(name, '^o:(%d+)$')
    if turn then
      local open = cjson.decode(redis.call('HGET', KEYS[1], name))
      open.turn = tonumber(turn)
      if open.deadline > now then live[#live + 1] = open end
    end
  end
  return live
end
"""

BEGIN = (
    _ALIVE
    + _OPEN_TURNS
    + """
-- ARGV: gen, at, now, hold of an `ending`, turns left below the cap, TTL, token, branch, open turn (JSON).
if redis.call('HGET', KEYS[1], 'gen') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'at') ~= ARGV[2] then return {'moved'} end
local now = tonumber(ARGV[3])
local live = open_turns(now)
for _, open in ipairs(live) do
  if open.token == ARGV[7] then return {'ok', open.turn} end
end
local ending = redis.call('HGET', KEYS[1], 'ending')
if ending and tonumber(ending) + tonumber(ARGV[4]) > now then return {'ending'} end
for _, open in ipairs(live) do
  if open.branch == ARGV[8] then return {'busy', open.turn} end
end
if #live >= tonumber(ARGV[5]) then return {'full'} end
local turn = redis.call('HINCRBY', KEYS[1], 'next', 1) - 1
redis.call('HSET', KEYS[1], 'o:' .. turn, ARGV[9], 'last', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[6])
return {'ok', turn}
"""
)

DISPATCHED = """
-- ARGV: turn, RG_JOBS sequence.
if redis.call('HEXISTS', KEYS[1], 'o:' .. ARGV[1]) == 0 then return 'gone' end
redis.call('HSET', KEYS[1], 'd:' .. ARGV[1], ARGV[2])
return 'ok'
"""

ABANDON = """
-- ARGV: turn.  It was never stored as a job: its branch is free, its number is spent.
redis.call('HDEL', KEYS[1], 'o:' .. ARGV[1], 'd:' .. ARGV[1])
return 'ok'
"""

RESERVE_BRANCH = (
    _ALIVE
    + """
-- ARGV: gen, at, branch, now, branches left below the cap, seconds a reservation holds.
if redis.call('HGET', KEYS[1], 'gen') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'at') ~= ARGV[2] then return {'moved'} end
local reserved = 0
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(name, 1, 2) == 'b:' and name ~= 'b:' .. ARGV[3] then
    if tonumber(redis.call('HGET', KEYS[1], name)) + tonumber(ARGV[6]) > tonumber(ARGV[4]) then reserved = reserved + 1
    else redis.call('HDEL', KEYS[1], name) end
  end
end
if reserved >= tonumber(ARGV[5]) then return {'full'} end
redis.call('HSET', KEYS[1], 'b:' .. ARGV[3], ARGV[4])
return {'ok'}
"""
)

BEGIN_END = (
    _ALIVE
    + _OPEN_TURNS
    + """
-- ARGV: now, 'idle' (refused while a turn is open, or one began after ARGV[3]) or 'any', last.
local live = open_turns(tonumber(ARGV[1]))
if ARGV[2] == 'idle' then
  if #live > 0 then return {'busy', live[1].turn} end
  if redis.call('HGET', KEYS[1], 'last') ~= ARGV[3] then return {'moved'} end
end
redis.call('HSET', KEYS[1], 'ending', ARGV[1])
return {'ok'}
"""
)

CLOSED = """
-- ARGV: RG_TRAJECTORIES sequence.  The group was closed without an end of this session.
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'closed', ARGV[1]) end
return 'ok'
"""

CANCEL_END = """
redis.call('HDEL', KEYS[1], 'ending')
return 'ok'
"""

LOCK = """
-- ARGV: token, milliseconds.
if redis.call('GET', KEYS[1]) == ARGV[1] then return 1 end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return 0
"""

UNLOCK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 'ok'
"""

ADMIT = """
-- Open sessions of a tenant.  ARGV: session, now, when it may be forgotten, cap.  -1 = there is room, else how many are open.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
local open = redis.call('ZCARD', KEYS[1])
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) and open >= tonumber(ARGV[4]) then return open end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
return -1
"""

LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
return 'ok'
"""

SCHEDULE = """
-- ARGV: member, UNIX second at which it is looked at.
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return 'ok'
"""

CLAIM = """
-- ARGV: now, until when the claim holds, how many.  Members that are due; a claim whose holder died is due again.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
for _, member in ipairs(due) do redis.call('ZADD', KEYS[1], ARGV[2], member) end
return due
"""

COUNT = "return redis.call('ZCARD', KEYS[1])"

EXISTS = "return redis.call('EXISTS', KEYS[1])"

ALL = {name: source for name, source in globals().items() if name.isupper() and not name.startswith("_")}
"""By name."""
