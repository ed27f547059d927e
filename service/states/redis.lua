-- The functions of the store of states in Redis, each carried out at one moment. redis.py lists the keys.
--
-- KEYS[1]: the hash of the tenant's usage; its name without "usage" begins all keys of the tenant. ARGV[1]: the function.

local call, prefix = redis.call, KEYS[1]:sub(1, -6)
local functions = {}

-- Names and values of a state's fields, in turns; empty if there is no such state.
local function state(id)
    local fields = call("HGETALL", prefix .. "state:" .. id)
    if #fields > 0 then
        local status, sha256 = unpack(call("HMGET", prefix .. "state:" .. id, "status", "sha256"))
        fields[#fields + 1] = "shared_by"
        fields[#fields + 1] = status == "ready" and call("SCARD", prefix .. "sharing:" .. sha256) or 0
        fields[#fields + 1] = "ids_size"
        fields[#fields + 1] = call("STRLEN", prefix .. "ids:" .. id)
    end
    return fields
end

local tables = {
    tenant = function()
        local fields = call("HGETALL", KEYS[1])
        for name, count in pairs({ names = "HLEN", keys = "ZCARD", gone = "ZCARD" }) do
            fields[#fields + 1] = name
            fields[#fields + 1] = call(count, prefix .. name)
        end
        return fields
    end,
    state = state,
    sharing = function(sha256)
        return { call("SCARD", prefix .. "sharing:" .. sha256), call("SCARD", prefix .. "pins:" .. sha256) }
    end,
    kin = function(id)
        return call("HGET", prefix .. "kin", id)
    end,
    named = function(id)
        return call("SMEMBERS", prefix .. "named:" .. id)
    end,
    name = function(name)
        return call("HGET", prefix .. "names", name)
    end,
    key = function(key)
        return call("HMGET", prefix .. "key:" .. key, "digest", "state", "created")
    end,
    document = function(document)
        local key, kind, id = prefix .. "doc:" .. document, document:match("^(.-):(.*)$")
        local version, due, expires = unpack(call("HMGET", key, "version", "due", "expires"))
        return { version, call("HSTRLEN", key, "body"), due, expires, call("ZSCORE", prefix .. "docs:" .. kind, id) }
    end,
    body = function(document)
        return call("HGET", prefix .. "doc:" .. document, "body")
    end,
}

-- The rows of keys such as "name:NAME". ARGV, as in all functions, because a call in Lua has at most 8,000 arguments.
function functions.rows()
    local rows = {}
    for at = 2, #ARGV do
        local name, id = ARGV[at]:match("^(%l+):(.*)$")
        rows[at - 1] = tables[name](id)
    end
    return rows
end

-- A state, its parent, and so on, each with its token ids. ARGV: the first state, and the most states.
function functions.line()
    local line, id = {}, ARGV[2]
    while id and id ~= "" and #line < tonumber(ARGV[3]) do
        local fields = state(id)
        if #fields == 0 then
            break
        end
        line[#line + 1] = { fields, call("GET", prefix .. "ids:" .. id) or "" }
        id = call("HGET", prefix .. "state:" .. id, "parent")
    end
    return line
end

-- Note that a ready state is used now. By pcall, because a Redis that refuses writes can still be read. ARGV: the state, and the time.
function functions.touch()
    if call("HGET", prefix .. "state:" .. ARGV[2], "status") == "ready" then
        redis.pcall("HSET", prefix .. "state:" .. ARGV[2], "used", ARGV[3])
        redis.pcall("ZADD", prefix .. "lru", "XX", ARGV[3], ARGV[2])
    end
end

-- Carry out commands, if the tenant's version still holds; return whether it does. ARGV: the version, whether the commands only delete, and
-- each command after its number of words. The second word is its key without the prefix.
function functions.commit()
    if (call("HGET", KEYS[1], "version") or "0") ~= ARGV[2] then
        return 0
    end
    if ARGV[3] == "1" then
        call("HDEL", KEYS[1], "") -- a Redis whose memory is full allows all writes of a script that begins with a deletion
    end
    if #ARGV > 3 then
        call("HINCRBY", KEYS[1], "version", 1)
    end
    local at = 4
    while at <= #ARGV do
        local last = at + ARGV[at]
        local reply = call(ARGV[at + 1], prefix .. ARGV[at + 2], unpack(ARGV, at + 3, last))
        if ARGV[at + 1] == "HINCRBY" and reply == 0 then
            call("HDEL", prefix .. ARGV[at + 2], ARGV[at + 3]) -- a count of 0 is no field, or the hash would grow for ever
        end
        at = last + 1
    end
    return 1
end

return functions[ARGV[1]]()
