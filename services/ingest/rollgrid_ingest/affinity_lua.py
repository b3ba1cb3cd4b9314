"""The affinity's transitions in Redis, as Lua: each is one step for every replica of ingest.

All keys of a pool share its hash tag.  The clock is Redis' own, one for all.
"""

PLACE = """
-- Where a session goes: to the worker it is bound to while that may stay, else to the first in order with room.
-- KEYS: the session's binding, then each candidate's bound sessions, best candidate first.
-- ARGV: seconds a binding lives, the session's name among the bound, the bound's factor, the prefix of the keys of
--       bound sessions, then for each candidate its name, its slots and whether it is 'idle', 'full' or 'saturated'.
-- Returns the worker, what became of the binding (kept, moved, new) and the worker it was bound to before.
local ttl, member, factor, prefix = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4]
local count = #KEYS - 1
local before = redis.call('GET', KEYS[1]) or ''
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6

local names, slots, states = {}, {}, {}
local at, all_slots, any_idle = 0, 0, false
for i = 1, count do
  names[i], slots[i], states[i] = ARGV[2 + 3 * i], tonumber(ARGV[3 + 3 * i]), ARGV[4 + 3 * i]
  all_slots = all_slots + slots[i]
  any_idle = any_idle or states[i] == 'idle'
  if names[i] == before then at = i end
end

local function bind(i, what)
  redis.call('ZADD', KEYS[i + 1], now + ttl, member)
  redis.call('EXPIRE', KEYS[i + 1], ttl)
  redis.call('SET', KEYS[1], names[i], 'EX', ttl)
  return {names[i], what, before}
end

local kept
if at > 0 then
  kept = bind(at, 'kept')
  if states[at] == 'idle' or not any_idle then return kept end
elseif before ~= '' then
  redis.call('ZREM', prefix .. before, member)
end

local total, loads = at > 0 and 0 or 1, {}
for i = 1, count do
  redis.call('ZREMRANGEBYSCORE', KEYS[i + 1], '-inf', now)
  loads[i] = redis.call('ZCARD', KEYS[i + 1])
  total = total + loads[i]
end
local function most(i) return math.ceil(factor * total * slots[i] / all_slots - 1e-9) end

if at > 0 and states[at] ~= 'saturated' and loads[at] <= most(at) then return kept end
for i = 1, count do
  if i ~= at and loads[i] < most(i) and (at == 0 or states[i] == 'idle') then
    if at > 0 then redis.call('ZREM', KEYS[at + 1], member) end
    return bind(i, before == '' and 'new' or 'moved')
  end
end
return kept or bind(1, before == '' and 'new' or 'moved')
"""

RELEASE = """
-- The session has ended.  KEYS: its binding.  ARGV: its name among the bound, the prefix of their keys.
local worker = redis.call('GET', KEYS[1])
if worker then redis.call('ZREM', ARGV[2] .. worker, ARGV[1]) end
return redis.call('DEL', KEYS[1])
"""

LOADS = """
-- How many sessions are bound, for each of KEYS.
local clock, found = redis.call('TIME'), {}
for i, key in ipairs(KEYS) do found[i] = redis.call('ZCOUNT', key, clock[1], '+inf') end
return found
"""

BOUND_TO = "return redis.call('GET', KEYS[1])"
