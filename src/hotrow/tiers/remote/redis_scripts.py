"""The Lua scripts that write rows to Redis. They compare publication numbers at the server, so that a write never
replaces a newer row. docs/formats/remote.md describes the fields.

Each script has one key, because a command with two keys would have to wait while its slot is being moved.
"""

# KEYS: a partition. ARGV: version, complete, whether the table is being filled, then field, value, field, value ...; an
# empty value erases. Returns how many rows changed.
WRITE = b"""
local rows, version, complete = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local marks = redis.call('HMGET', rows, 'floor', 'dead', 'here')
if not marks[3] and ARGV[3] == '0' then return redis.error_reply('LOST the partition is not what was written') end
local floor, dead = tonumber(marks[1] or '-1'), marks[2] or ''
if dead ~= '' and complete > 0 and complete > floor then
  local left = {}
  for i = 1, #dead, 8 do
    local name = 'd' .. string.sub(dead, i, i + 7)
    local at = redis.call('HGET', rows, name)
    if at and tonumber(at) <= complete then
      redis.call('HDEL', rows, name)
    elseif at then
      left[#left + 1] = string.sub(name, 2)
    end
  end
  dead, floor = table.concat(left), complete
  redis.call('HSET', rows, 'floor', ARGV[2], 'dead', dead)
end
if version <= floor then return 0 end
local changed, killed = 0, {}
for i = 4, #ARGV, 2 do
  local field, value = ARGV[i], ARGV[i + 1]
  local old = redis.call('HGET', rows, field)
  local gone = not old and redis.call('HGET', rows, 'd' .. field)
  local seen = old and struct.unpack('<I8', old) or tonumber(gone or '-1')
  if version >= seen then
    if value ~= '' then
      redis.call('HSET', rows, field, value)
      if gone then redis.call('HDEL', rows, 'd' .. field) end
      changed = changed + 1
    else
      if old then
        redis.call('HDEL', rows, field)
        changed = changed + 1
      end
      if not gone then killed[#killed + 1] = field end
      redis.call('HSET', rows, 'd' .. field, ARGV[1])
    end
  end
end
if #killed > 0 then redis.call('HSET', rows, 'dead', dead .. table.concat(killed)) end
return changed
"""

# KEYS: meta. ARGV: number, after. Returns the number that was complete before.
BEGIN = b"""
local complete = tonumber(redis.call('HGET', KEYS[1], 'complete') or '0')
if complete == tonumber(ARGV[2]) and tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], 'started') or '0') then
  redis.call('HSET', KEYS[1], 'started', ARGV[1])
end
return complete
"""

# KEYS: meta. ARGV: number.
FINISH = b"""
for _, mark in ipairs({'started', 'complete'}) do
  if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], mark) or '-1') then
    redis.call('HSET', KEYS[1], mark, ARGV[1])
  end
end
"""

# KEYS: a partition. ARGV: version, cursor, how many fields to scan. Returns the next cursor and how many rows it
# removed. It raises the floor first, so that a writer that is behind cannot write removed rows again.
PURGE = b"""
if redis.replicate_commands then redis.replicate_commands() end
local rows, version = KEYS[1], tonumber(ARGV[1])
if version > tonumber(redis.call('HGET', rows, 'floor') or '-1') then redis.call('HSET', rows, 'floor', ARGV[1]) end
local found, gone = redis.call('HSCAN', rows, ARGV[2], 'COUNT', ARGV[3]), 0
for i = 1, #found[2], 2 do
  if #found[2][i] == 8 and struct.unpack('<I8', found[2][i + 1]) < version then
    gone = gone + redis.call('HDEL', rows, found[2][i])
  end
end
return {found[1], gone}
"""
