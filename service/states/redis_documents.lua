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

function calls.write(a, body)
    local version, size, expired = document(a.kind, a.id)
    version = expired and 0 or version
    if a.expected and a.expected ~= version then
        return { "refused", "document_moved", version }
    end
    local evicted, refused = {}, nil
    if #body > size then
        evicted, refused = room(a.quota, 0, #body - size)
        if refused then
            return refused
        end
    end

    if expired then
        erase(a.kind, a.id) -- the next document with this id is a new one, also in its place in pages
        size = 0
    end
    local doc = key("doc", a.kind, a.id)
    if version == 0 then
        redis_call("ZADD", key("docs", a.kind), redis_call("HINCRBY", KEYS[1], "seq", 1), a.id)
    end
    redis_call("HSET", doc, "body", body, "version", version + 1, "due", a.due, "expires", a.expires)
    index("due:" .. a.kind, a.id, a.due)
    index("docs_end", a.kind .. ":" .. a.id, a.expires)
    count("size", #body - size)
    evict(evicted)
    return { "ok", version + 1, #evicted }
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
        return { "refused", "document_moved", version }
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

-- Forget the row of a state that is gone, and those of its parents that were kept for it alone.
local function forget(id)
    while id ~= "" do
        local parent = redis_call("HGET", key("state", id), "parent")
        redis_call("DEL", key("state", id), key("ids", id))
        if not parent or parent == "" or redis_call("HINCRBY", key("kin"), parent, -1) > 0 then
            return
        end
        redis_call("HDEL", key("kin"), parent)
        -- Its time has come if it is gone and was taken off the list below.
        local is_gone = redis_call("HGET", key("state", parent), "status")
        if not is_gone or is_gone == "ready" or redis_call("ZSCORE", key("gone"), parent) then
            return
        end
        id = parent
    end
end

-- Do up to `most` of each kind of work. Returns how many states have expired, and whether there may be more to do.
function calls.sweep(a)
    local function ended(name, until_)
        return redis_call("ZRANGEBYSCORE", key(name), "-inf", until_, "LIMIT", 0, a.most)
    end
    local states, keys = ended("end", now_text), ended("keys", a.keys_until)
    for _, id in ipairs(states) do
        drop(id, "expired")
    end
    for _, each in ipairs(keys) do
        redis_call("DEL", key("key", each))
        redis_call("ZREM", key("keys"), each)
    end
    local gone = ended("gone", a.gone_until)
    for _, id in ipairs(gone) do
        redis_call("ZREM", key("gone"), id)
        if not redis_call("HGET", key("kin"), id) then
            forget(id)
        end
    end
    local documents = ended("docs_end", now_text)
    for _, each in ipairs(documents) do
        erase(each:match("^(.-):(.*)$"))
    end
    local most = math.max(#states, #keys, #gone, #documents)
    return { "ok", #states, most == a.most and 1 or 0 }
end

local arguments = cjson.decode(ARGV[3])
if arguments.quota then -- a call that may be the first of its tenant
    if arguments.tenant then
        redis_call("HSET", KEYS[1], "tenant", arguments.tenant)
    elseif redis_call("HEXISTS", KEYS[1], "tenant") == 0 then
        return { "register" }
    end
end
return calls[ARGV[1]](arguments, ARGV[4], ARGV[5])
