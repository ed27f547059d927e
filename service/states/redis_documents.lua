-- The calls of the store of states in Redis, second half: documents, the sweep, and the choice of the call. Follows redis_states.lua in one
-- script.

-- Documents ---------------------------------------------------------------------------------------------------------------------------

-- Version and bytes of a document; 0 if there is none. Third: whether it has expired.
local function document(kind, id)
    local version, expires = unpack(redis_call("HMGET", key("doc", kind, id), "version", "expires"))
    return tonumber(version or 0), redis_call("HSTRLEN", key("doc", kind, id), "body"), over(expires)
end

local function erase(kind, id)
    local size = redis_call("HSTRLEN", key("doc", kind, id), "body")
    redis_call("DEL", key("doc", kind, id)) -- first, as in `drop`
    count("size", -size)
    redis_call("ZREM", key("docs", kind), id)
    redis_call("ZREM", key("due", kind), id)
    redis_call("ZREM", key("docs_end"), kind .. ":" .. id)
end

local function index(name, member, at)
    if at == "" then
        redis_call("ZREM", key(name), member)
    else
        redis_call("ZADD", key(name), at, member)
    end
end

-- Write documents, whose bodies follow the arguments: all of them or none.
function calls.write(a, ...)
    local bodies, before, growth = { ... }, {}, 0
    for at, new in ipairs(a.documents) do
        local version, size, expired = document(new.kind, new.id)
        version = expired and 0 or version
        if new.expected and new.expected ~= version then
            return { "refused", "document_moved", new.kind, new.id, version, new.expected }
        end
        before[at] = { version = version, size = size, expired = expired }
        growth = growth + #bodies[at] - size
    end
    local evicted, refused = {}, nil
    if growth > 0 then
        evicted, refused = room(a.quota, 0, growth)
        if refused then
            return refused
        end
    end

    local versions = {}
    for at, new in ipairs(a.documents) do
        local body, old = bodies[at], before[at]
        if old.expired then
            erase(new.kind, new.id) -- the next document with this id is a new one, also in its place in pages
            old.size = 0
        end
        local doc = key("doc", new.kind, new.id)
        if old.version == 0 then
            redis_call("ZADD", key("docs", new.kind), redis_call("HINCRBY", KEYS[1], "seq", 1), new.id)
        end
        versions[at] = old.version + 1
        redis_call("HSET", doc, "body", body, "version", versions[at], "due", new.due, "expires", new.expires)
        index("due:" .. new.kind, new.id, new.due)
        index("docs_end", new.kind .. ":" .. new.id, new.expires)
        count("size", #body - old.size)
    end
    evict(evicted)
    return { "ok", #evicted, versions }
end

function calls.read(a)
    local version, _, expired = document(a.kind, a.id)
    if version == 0 or expired then
        return { "refused", "no_document" }
    end
    return { "ok", redis_call("HMGET", key("doc", a.kind, a.id), "body", "version", "due", "expires") }
end

function calls.erase(a)
    local version, _, expired = document(a.kind, a.id)
    if version == 0 or expired then
        return { "refused", "no_document" }
    end
    if a.expected and a.expected ~= version then
        return { "refused", "document_moved", a.kind, a.id, version, a.expected }
    end
    erase(a.kind, a.id)
    return { "ok" }
end

function calls.documents(a)
    local from = "+inf"
    if a.after then
        local seq = redis_call("ZSCORE", key("docs", a.kind), a.after)
        if not seq then
            return { "refused", "no_page", a.kind, a.after }
        end
        from = "(" .. seq
    end
    local found = {}
    while #found < a.limit do
        local ids = redis_call("ZREVRANGEBYSCORE", key("docs", a.kind), from, "-inf", "LIMIT", 0, a.limit)
        for _, id in ipairs(ids) do
            local _, _, expired = document(a.kind, id)
            if not expired and #found < a.limit then
                found[#found + 1] = { id, redis_call("HMGET", key("doc", a.kind, id), "body", "version", "due", "expires") }
            end
        end
        if #ids < a.limit then
            break
        end
        from = "(" .. redis_call("ZSCORE", key("docs", a.kind), ids[#ids])
    end
    return { "ok", found }
end

-- Sweep -------------------------------------------------------------------------------------------------------------------------------

-- Delete the row of a state that is gone and has no children. Its parent is next if its row was kept for this child alone.
local function forget(id)
    local parent = redis_call("HGET", key("state", id), "parent")
    redis_call("DEL", key("state", id), key("ids", id))
    if not parent or parent == "" or redis_call("HINCRBY", key("kin"), parent, -1) > 0 then
        return
    end
    redis_call("HDEL", key("kin"), parent)
    -- A parent whose time has not come yet is still in `gone`.
    local status = redis_call("HGET", key("state", parent), "status")
    if status and status ~= "ready" then
        redis_call("ZADD", key("gone"), "NX", "-inf", parent)
    end
end

-- End or delete up to `most` rows. Returns how many states have expired, and how many more rows the call could have taken.
function calls.sweep(a)
    local left = a.most
    local function ended(name, until_)
        local found = left == 0 and {} or redis_call("ZRANGEBYSCORE", key(name), "-inf", until_, "LIMIT", 0, left)
        left = left - #found
        return found
    end
    local states = ended("end", now_text)
    for _, id in ipairs(states) do
        drop(id, "expired")
    end
    for _, each in ipairs(ended("keys", a.keys_until)) do
        redis_call("DEL", key("key", each))
        redis_call("ZREM", key("keys"), each)
    end
    for _, each in ipairs(ended("docs_end", now_text)) do
        erase(each:match("^(.-):(.*)$"))
    end
    local gone = ended("gone", a.gone_until)
    while #gone > 0 do
        for _, id in ipairs(gone) do
            redis_call("ZREM", key("gone"), id)
            if not redis_call("HGET", key("kin"), id) then
                forget(id)
            end
        end
        gone = ended("gone", a.gone_until) -- again, for the parents of the deleted rows
    end
    return { "ok", #states, left }
end

local arguments = cjson.decode(ARGV[3])
if arguments.quota then -- a call that may be the first of its tenant
    if arguments.tenant then
        redis_call("HSET", KEYS[1], "tenant", arguments.tenant)
    elseif redis_call("HEXISTS", KEYS[1], "tenant") == 0 then
        return { "register" }
    end
end
return calls[ARGV[1]](arguments, unpack(ARGV, 4))
