-- The calls of the store of states in Redis, first half: states and names. redis.py lists the keys and sends the arguments.
--
-- KEYS[1]: the tenant's usage; its name without "usage" begins all keys of the tenant. ARGV: the call, the time, its arguments as JSON,
-- and texts of bytes. A call returns {"ok", ...} or {"refused", why, ...}, or {"register"} if the tenant is new.
--
-- A script is atomic, but an error does not undo what it has written: so each call makes all its checks before its first write.
-- Times are kept as the texts that came, because Lua would write numbers with 14 digits.

local prefix = KEYS[1]:sub(1, -6)
local now_text, now = ARGV[2], tonumber(ARGV[2])
local redis_call = redis.call
local calls = {}

local function key(...)
    return prefix .. table.concat({ ... }, ":")
end

local function count(what, by)
    if by ~= 0 then -- Redis refuses "-0"
        redis_call("HINCRBY", KEYS[1], what, by)
    end
end

local function over(expires)
    return expires and expires ~= "" and tonumber(expires) <= now
end

-- The version of a name and its state; 0 if there is none.
local function named(name)
    local found = redis_call("HGET", key("names"), name)
    if not found then
        return 0
    end
    local version, state = found:match("^(%d+):(.*)$")
    return tonumber(version), state
end

-- The highest version of the deleted names. New names begin above it, so that no version of a name is used again.
local function version_floor()
    return tonumber(redis_call("HGET", KEYS[1], "version_floor") or 0)
end

local function unname(name)
    local version, state = named(name)
    redis_call("HDEL", key("names"), name) -- first, as in `drop`
    redis_call("SREM", key("named", state), name)
    if version > version_floor() then
        redis_call("HSET", KEYS[1], "version_floor", version)
    end
end

-- States ------------------------------------------------------------------------------------------------------------------------------

-- The refusal of a state that is not ready; nil if it is.
local function refusal(id)
    local status, expires = unpack(redis_call("HMGET", key("state", id), "status", "expires"))
    if not status or status == "deleted" then
        return { "refused", "no_state", id }
    end
    if status ~= "ready" then
        return { "refused", "gone", id, status }
    end
    if over(expires) then
        return { "refused", "gone", id, "expired" }
    end
end

-- Names and values of a state's fields, in turns; nil if there is no such state.
local function record(id)
    local fields = redis_call("HGETALL", key("state", id))
    if #fields == 0 then
        return nil
    end
    local row = {}
    for at = 1, #fields, 2 do
        row[fields[at]] = fields[at + 1]
    end
    fields[#fields + 1] = "shared_by"
    fields[#fields + 1] = row.status == "ready" and redis_call("SCARD", key("sharing", row.sha256)) or 0
    return fields, row
end

local function pin(id, pinned)
    local state = key("state", id)
    local now_pinned, sha256, size, used = unpack(redis_call("HMGET", state, "pinned", "sha256", "size", "used"))
    if now_pinned == pinned then
        return
    end
    redis_call("HSET", state, "pinned", pinned)
    local pins = key("pins", sha256)
    if pinned == "1" then
        redis_call("ZREM", key("lru"), id)
        redis_call("SADD", pins, id)
        if redis_call("SCARD", pins) == 1 then
            count("pinned_size", tonumber(size))
        end
    else
        redis_call("ZADD", key("lru"), used, id)
        redis_call("SREM", pins, id)
        if redis_call("SCARD", pins) == 0 then
            count("pinned_size", -tonumber(size))
        end
    end
end

-- Release the blob of a state and its names. The row stays while others need its ids, or may ask why it is gone.
local function drop(id, why)
    local state = key("state", id)
    redis_call("ZREM", key("ready"), id) -- begin with a write that Redis allows when its memory is full, so that it allows the others
    pin(id, "0")
    local sha256, size, parent = unpack(redis_call("HMGET", state, "sha256", "size", "parent"))
    redis_call("HSET", state, "status", why, "used", now_text)
    for _, name in ipairs(redis_call("SMEMBERS", key("named", id))) do
        unname(name)
    end
    redis_call("SREM", key("sharing", sha256), id)
    if redis_call("SCARD", key("sharing", sha256)) == 0 then
        redis_call("DEL", key("blob", sha256))
        count("size", -tonumber(size))
    end
    redis_call("ZREM", key("lru"), id)
    redis_call("ZREM", key("end"), id)
    redis_call("ZREM", key("children", parent), id)
    redis_call("ZADD", key("gone"), why == "deleted" and "-inf" or now_text, id)
    count("states", -1)
end

-- The states to evict, least recently used first, so that `states` and `size` more are within the quota; or nil and the refusal.
-- `sha256`: the blob that one more state will share.
local function room(quota, states, size, sha256)
    local kept = redis_call("HMGET", KEYS[1], "states", "size")
    states, size = states + (tonumber(kept[1]) or 0), size + (tonumber(kept[2]) or 0)
    local evicted, left, page = {}, {}, nil
    while states > quota.states or size > quota.size do
        local at = #evicted % 100
        if at == 0 then
            page = redis_call("ZRANGE", key("lru"), #evicted, #evicted + 99)
        end
        local id = page[at + 1]
        if not id then
            return nil, { "refused", "over_quota", states, size }
        end
        local sha, bytes = unpack(redis_call("HMGET", key("state", id), "sha256", "size"))
        left[sha] = (left[sha] or redis_call("SCARD", key("sharing", sha)) + (sha == sha256 and 1 or 0)) - 1
        size = left[sha] == 0 and size - tonumber(bytes) or size
        states = states - 1
        evicted[#evicted + 1] = id
    end
    return evicted
end

local function evict(states)
    for _, id in ipairs(states) do
        drop(id, "evicted")
    end
end

local function name_refusal(change)
    local version = named(change.name)
    if change.version and change.version ~= version then
        return { "refused", "name_moved", version, change.name, change.version }
    end
end

local function move(name, id)
    local version, old = named(name)
    if old then
        redis_call("SREM", key("named", old), name)
    end
    version = (old and version or version_floor()) + 1
    redis_call("SADD", key("named", id), name)
    redis_call("HSET", key("names"), name, string.format("%d:%s", version, id))
    return version
end

-- The answer to a request whose key is remembered; nil if it is not.
local function answered(given)
    local digest, state, created = unpack(redis_call("HMGET", key("key", given.key), "digest", "state", "created"))
    if not digest or tonumber(created) <= given.since then
        return nil
    end
    if digest ~= given.digest then
        return { "refused", "key_reused", given.key }
    end
    return refusal(state) or { "ok", (record(state)) }
end

-- The answer of the call that has made this state, known by its key or by its id; nil if none has.
local function made(given, sha256)
    local earlier = given.key and answered(given.key)
    if earlier then
        return earlier
    end
    local id = given.record.id
    if redis_call("EXISTS", key("state", id)) == 1 then
        local parent, kept = unpack(redis_call("HMGET", key("state", id), "parent", "sha256"))
        if parent ~= given.record.parent or (sha256 and kept ~= sha256) then
            return { "refused", "exists", id }
        end
        return refusal(id) or { "ok", (record(id)) }
    end
end

-- Write a new state, whose blob is there.
local function keep(given, ids, sha256, size)
    local id, parent = given.record.id, given.record.parent
    local seq = redis_call("HINCRBY", KEYS[1], "seq", 1)
    local fields = { "sha256", sha256, "size", size, "seq", seq, "pinned", "0", "status", "ready" }
    for name, value in pairs(given.record) do
        fields[#fields + 1] = name
        fields[#fields + 1] = value
    end
    redis_call("HSET", key("state", id), unpack(fields))
    redis_call("SET", key("ids", id), ids)
    redis_call("SADD", key("sharing", sha256), id)
    redis_call("ZADD", key("ready"), seq, id)
    redis_call("ZADD", key("lru"), given.record.used, id)
    if given.record.expires ~= "" then
        redis_call("ZADD", key("end"), given.record.expires, id)
    end
    if parent ~= "" then
        redis_call("ZADD", key("children", parent), seq, id)
        redis_call("HINCRBY", key("kin"), parent, 1)
    end
    count("states", 1)
    pin(id, given.pinned)
    if given.key then
        redis_call("HSET", key("key", given.key.key), "digest", given.key.digest, "state", id, "created", now_text)
        redis_call("ZADD", key("keys"), now_text, given.key.key)
    end
end

-- Note that a state is used now. By pcall, because a Redis that refuses writes can still be read.
local function touch(id)
    redis.pcall("HSET", key("state", id), "used", now_text)
    if redis_call("HGET", key("state", id), "pinned") ~= "1" then
        redis.pcall("ZADD", key("lru"), now_text, id)
    end
end

-- Keep states that share one blob, a new one or that of their parent: all of them or none.
function calls.put(a, ids, blob)
    local found, new = {}, {}
    for at, given in ipairs(a.states) do
        local earlier = made(given, a.sha256)
        if earlier and earlier[1] == "refused" then
            return earlier
        end
        found[at] = earlier and earlier[2]
        new[#new + 1] = not earlier and given or nil
    end
    if #new == 0 then
        return { "ok", 0, found }
    end
    local sha256, size = a.sha256, a.size
    if not blob then
        local parent = new[1].record.parent
        local refused = refusal(parent)
        if refused then
            return refused
        end
        touch(parent) -- so that it is not evicted before its own forks
        sha256, size = unpack(redis_call("HMGET", key("state", parent), "sha256", "size"))
    end
    local refused = a.change and name_refusal(a.change)
    if refused then
        return refused
    end
    size = tonumber(size)
    local is_new = redis_call("SCARD", key("sharing", sha256)) == 0
    local evicted, too_much = room(a.quota, #new, is_new and size or 0, sha256)
    if not evicted then
        return too_much
    end

    if blob and redis_call("EXISTS", key("blob", sha256)) == 0 then
        redis_call("SET", key("blob", sha256), blob)
    end
    if is_new then
        count("size", size)
    end
    for _, given in ipairs(new) do
        keep(given, ids, sha256, size)
    end
    if a.change then
        move(a.change.name, new[1].record.id)
    end
    evict(evicted)
    for at, given in ipairs(a.states) do
        found[at] = found[at] or record(given.record.id)
    end
    return { "ok", #evicted, found }
end

function calls.get(a)
    return refusal(a.id) or { "ok", (record(a.id)) }
end

function calls.use(a)
    local refused = refusal(a.id)
    if not refused then
        touch(a.id)
    end
    return refused or { "ok", (record(a.id)) }
end

function calls.blob(a)
    local refused = refusal(a.id)
    if refused then
        return refused
    end
    touch(a.id)
    local sha256 = redis_call("HGET", key("state", a.id), "sha256")
    return { "ok", sha256, redis_call("GET", key("blob", sha256)) or "" }
end

-- Set damaged bytes apart, unless they have been replaced meanwhile: all states that share them are gone.
function calls.quarantine(a)
    local blob = redis_call("GET", key("blob", a.sha256)) or ""
    if redis.sha1hex(blob) ~= a.damaged then
        return { "ok", 0 }
    end
    local states = redis_call("SMEMBERS", key("sharing", a.sha256))
    for _, id in ipairs(states) do
        drop(id, "damaged")
    end
    if blob ~= "" then
        redis_call("SET", key("damaged", a.sha256), blob, "EX", a.kept_s)
    end
    return { "ok", #states }
end

-- Up to `limit` states before `seq` that fit the filter, newest first. Second: where to look further, "" if there is no more.
function calls.page(a)
    local from, ids = a.seq, nil
    if a.after then
        from = redis_call("HGET", key("state", a.after), "seq")
        if not from then
            return { "refused", "no_page", "state", a.after }
        end
    end
    if a.name then
        local _, id = named(a.name)
        local older = id and (not from or tonumber(redis_call("HGET", key("state", id), "seq")) < tonumber(from))
        ids = older and { id } or {}
    else
        ids = redis_call("ZREVRANGEBYSCORE", key("ready"), from and "(" .. from or "+inf", "-inf", "LIMIT", 0, a.scan)
    end
    local found = {}
    for _, id in ipairs(ids) do
        local fields, row = record(id)
        from = row.seq
        local fits = not over(row.expires) and (not a.model or row.model == a.model) and (not a.origin or row.origin == a.origin)
        local metadata = cjson.decode(row.metadata)
        for _, pair in ipairs(a.metadata) do
            fits = fits and metadata[pair[1]] == pair[2]
        end
        found[#found + 1] = fits and fields or nil
        if #found == a.limit then
            break
        end
    end
    return { "ok", (#ids == a.scan and #found < a.limit) and from or "", found }
end

function calls.change(a)
    local refused = refusal(a.id) or a.guard and name_refusal(a.guard) or a.change and name_refusal(a.change)
    if refused then
        return refused
    end
    if a.change then
        move(a.change.name, a.id)
    end
    local state = key("state", a.id)
    if a.expires then
        redis_call("HSET", state, "expires", a.expires)
        if a.expires == "" then
            redis_call("ZREM", key("end"), a.id)
        else
            redis_call("ZADD", key("end"), a.expires, a.id)
        end
    end
    if a.metadata then
        redis_call("HSET", state, "metadata", a.metadata)
    end
    if a.pinned then
        pin(a.id, a.pinned)
    end
    return refusal(a.id) or { "ok", (record(a.id)) }
end

function calls.delete(a)
    local refused = refusal(a.id) or a.guard and name_refusal(a.guard)
    if not refused then
        drop(a.id, "deleted")
    end
    return refused or { "ok" }
end

-- The states from `id` towards the first one, each with its ids, up to `scan`; and the parent of the last, to go on there.
function calls.lineage(a)
    local refused = a.first and refusal(a.id)
    if refused then
        return refused
    end
    local line, id = {}, a.id
    for _ = 1, a.scan do
        local fields, row = record(id)
        if not fields then
            return { "ok", "", line }
        end
        line[#line + 1] = { fields, redis_call("GET", key("ids", id)) or "" }
        id = row.parent
        if id == "" then
            break
        end
    end
    return { "ok", id, line }
end

function calls.children(a)
    local refused = refusal(a.id)
    if refused then
        return refused
    end
    local found = {}
    for at, id in ipairs(redis_call("ZREVRANGE", key("children", a.id), 0, a.limit - 1)) do
        found[at] = record(id)
    end
    return { "ok", found }
end

-- Names and keys ----------------------------------------------------------------------------------------------------------------------

function calls.name(a)
    local version, state = named(a.name)
    return state and { "ok", state, version } or { "refused", "no_name" }
end

function calls.names(a)
    local found = {}
    for at, name in ipairs(redis_call("SMEMBERS", key("named", a.id))) do
        found[at] = { name, (named(name)) }
    end
    return { "ok", found }
end

function calls.move(a)
    return refusal(a.id) or name_refusal(a.change) or { "ok", move(a.change.name, a.id) }
end

function calls.unname(a)
    if named(a.name) == 0 then
        return { "refused", "no_name" }
    end
    local refused = name_refusal(a.change)
    if not refused then
        unname(a.name)
    end
    return refused or { "ok" }
end

function calls.answered(a)
    return answered(a.key) or { "ok", {} }
end
