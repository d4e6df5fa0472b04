// A kvtier client in Node.js, over TCP on the loopback: npm install && node client.js [HOST:PORT]
//
// It opens a cache, puts four blocks, reads them back, checks every byte, and prints the events of what it did. The
// daemon: kvtierd --host-bytes 64MiB --listen-tcp 127.0.0.1:7411 --tcp-insecure
//           --allow '{"anonymous": true, "caches": ["*"], "verbs": ["read", "write", "watch"]}'
// What is said on the wire, and why: docs/wire.md.
import { createHash } from "node:crypto";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { xxhash128 } from "hash-wasm";

const PROTO = fileURLToPath(new URL("../../proto", import.meta.url));
const SERVICES = ["session", "caches", "blocks", "transfer", "events"];
const CHUNK = 1 << 20; // the most bytes of a message of Transfer
const CACHE = "node-example";
const SPEC = {
  model: "example",
  dtype: "float16",
  tokens_per_block: 16,
  world_size: 1,
  groups: [{ pools: [{ layers: 2, kv_heads: 4, head_size: 32, kv_factor: 2 }] }],
};
const BLOCK_BYTES = 2 * 2 * 4 * 32 * 16 * 2; // layers × keys and values × heads × head size × tokens × float16

// 64-bit numbers as strings: a JavaScript number holds 53 bits.
const definition = await loader.load(
  SERVICES.map((name) => `kvtier/v1/${name}.proto`),
  { keepCase: true, longs: String, enums: String, defaults: true, includeDirs: [PROTO] },
);
const { Sessions, Caches, Blocks, Transfer, Events } = grpc.loadPackageDefinition(definition).kvtier.v1;
const target = process.argv[2] ?? "127.0.0.1:7411";
const [sessions, caches, blocks, transfer, events] = [Sessions, Caches, Blocks, Transfer, Events].map(
  (Service) => new Service(target, grpc.credentials.createInsecure()),
);

function sha256(...parts) {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest();
}

function little(bytes, value) {
  const buffer = Buffer.alloc(bytes);
  buffer.writeUIntLE(value, 0, Math.min(bytes, 6));
  return buffer;
}

// The keys of the full blocks of a prompt, of a scope with neither adapter nor salt.
function chainKeys(tokens, tokensPerBlock) {
  let parent = sha256("kvtier.scope", little(4, 1), Buffer.alloc(9), Buffer.alloc(5), Buffer.alloc(4));
  const keys = [];
  for (let end = tokensPerBlock; end <= tokens.length; end += tokensPerBlock) {
    parent = sha256(parent, ...tokens.slice(end - tokensPerBlock, end).map((token) => little(4, token)));
    keys.push(parent);
  }
  return keys;
}

async function checksum(bytes) {
  return Buffer.from(await xxhash128(bytes), "hex"); // big-endian, seed 0
}

// A session is a stream that stays open. Both sides send heartbeats on it.
async function openSession() {
  const stream = sessions.Session();
  stream.write({ hello: { version: 1 } });
  const [{ welcome }] = await once(stream, "data");
  const beat = setInterval(() => stream.write({ heartbeat: {} }), Number(welcome.heartbeat_ns) / 1e6);
  const metadata = new grpc.Metadata();
  metadata.set("kvtier-session", welcome.token);
  stream.on("data", () => {}); // the daemon's heartbeats
  const end = async () => {
    clearInterval(beat);
    stream.write({ bye: {} });
    await once(stream, "status");
  };
  return { metadata, end };
}

function call(stub, method, request, metadata) {
  return new Promise((resolve, reject) =>
    stub[method](request, metadata, (error, reply) => (error ? reject(error) : resolve(reply))),
  );
}

async function put(header, payload, metadata) {
  let reply;
  const answered = new Promise((resolve, reject) => {
    reply = transfer.Put(metadata, (error, response) => (error ? reject(error) : resolve(response)));
  });
  answered.catch(() => {}); // told by the await below
  reply.write({ header });
  await Promise.race([once(reply, "metadata"), answered]); // slots are there: bytes are welcome
  for (const [block, bytes] of payload.entries())
    for (let offset = 0; offset < bytes.length; offset += CHUNK)
      reply.write({ bytes: { block, offset, data: bytes.subarray(offset, offset + CHUNK) } });
  reply.end();
  return answered;
}

async function get(acquire, metadata) {
  const data = [];
  const checksums = [];
  for await (const chunk of transfer.Get({ acquire }, metadata)) {
    if (chunk.bytes) data.push(chunk.bytes.data); // may end one block and begin the next
    checksums.push(chunk.checksums);
  }
  const bytes = Buffer.concat(data);
  const sums = Buffer.concat(checksums);
  const found = Array.from({ length: bytes.length / BLOCK_BYTES }, (_, block) =>
    bytes.subarray(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES),
  );
  for (const [block, each] of found.entries())
    if (!(await checksum(each)).equals(sums.subarray(16 * block, 16 * (block + 1))))
      throw new Error(`block ${block} was damaged on its way`);
  return found;
}

const { metadata, end } = await openSession();
const budgets = [{ tier: "TIER_HOST", bytes: 16 * BLOCK_BYTES }];
const { cache_id } = await call(caches, "Open", { name: CACHE, spec: SPEC, budgets, seq: 1 }, metadata);
const { caches: listed } = await call(caches, "List", {}, metadata);
console.log(`caches: ${listed.map((cache) => cache.name).join(" ")}`);

const watch = events.Watch({ filter: { caches: [CACHE] } }, metadata);
await once(watch, "metadata"); // from now on nothing is missed

const tokens = Array.from({ length: 4 * SPEC.tokens_per_block }, (_, place) => place);
const chain = chainKeys(tokens, SPEC.tokens_per_block);
const payload = chain.map((_, block) => Buffer.alloc(BLOCK_BYTES, block + 1));
const commit = {
  cache_id,
  keys: Buffer.concat(chain),
  parents: Buffer.concat([Buffer.alloc(32), ...chain.slice(0, -1)]), // zeros: the first block has no parent
  seq: 2,
};
const checksums = Buffer.concat(await Promise.all(payload.map(checksum)));
const { results } = await put({ commit, tier: "TIER_HOST", checksums }, payload, metadata);
console.log(`put: results ${[...results].join(" ")}`); // of enum BlockResult: 0 is OK

const match = await call(blocks, "Match", { cache_id, keys: commit.keys }, metadata);
console.log(`match: ${match.blocks} blocks`);
const read = await get({ cache_id, tier: "TIER_HOST", chains: [{ keys: commit.keys }] }, metadata);
console.log(`get: ${read.filter((bytes, block) => bytes.equals(payload[block])).length} blocks as they were put`);

for await (const batch of watch) {
  for (const event of batch.events)
    console.log(`event: ${event.type} ${event.cause} ${event.keys.toString("hex").slice(0, 8)} ${event.cache}`);
  if (batch.events.some((event) => event.type === "EVENT_TYPE_STORED")) break;
}
watch.cancel();
await call(caches, "Close", { cache_id, seq: 3 }, metadata);
await end();
