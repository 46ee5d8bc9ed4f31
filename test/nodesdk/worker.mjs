// A worker made with the iii-sdk of npm: see StartWorker. Bytes that it makes have
// the value (7 * position) mod 256; of bytes that it gets it returns how many they
// are and their SHA-256.
import { createHash } from 'node:crypto'
import { registerWorker, TriggerAction } from 'iii-sdk'
import { ChannelReader } from 'iii-sdk/channel'
import { createChannel } from 'iii-sdk/helpers'

const url = process.env.III_URL
const name = process.env.III_WORKER_NAME
const worker = registerWorker(url, { workerName: name, workerDescription: 'a real client' })

function bytes(size) {
  const block = Buffer.alloc(1 << 20)
  for (let i = 0; i < block.length; i++) block[i] = (7 * i) & 255
  return Buffer.concat(Array(Math.ceil(size / block.length)).fill(block)).subarray(0, size)
}

const digest = (data) => ({ bytes: data.length, sha256: createHash('sha256').update(data).digest('hex') })

// What a caller sees of an error.
const seen = (e) => ({ error: { name: e.name, code: e.code, message: e.message, function_id: e.function_id } })

// write sends size bytes, and a text before them when there is one.
function write(writer, size, text) {
  if (text) writer.sendMessage(text)
  return new Promise((resolve, reject) => {
    writer.stream.on('error', reject)
    writer.stream.on('finish', resolve)
    if (size > 0) writer.stream.write(bytes(size))
    writer.stream.end()
  })
}

// read takes all bytes and texts of a channel.
async function read(reader) {
  const texts = []
  reader.onMessage((text) => texts.push(text))
  return { ...digest(await reader.readAll()), texts }
}

const register = (leaf, handler, options) => worker.registerFunction(`${name}::${leaf}`, handler, options)

register('echo', async (data) => data, {
  description: 'returns its payload',
  request_format: { type: 'object' },
  response_format: { type: 'object' },
})
register('metadata', async (_data, metadata) => metadata)
register('fail', async ({ message }) => {
  throw new Error(message)
})
register('nothing', async () => undefined)
register('upload', async ({ reader }) => read(reader))
register('download', async ({ writer, size, text }) => {
  await write(writer, size, text)
  return { written: size }
})
// call calls function_id and returns its result, or its error as Node sees it.
register('call', async ({ function_id, payload, metadata, timeout_ms }) => {
  try {
    return { result: await worker.trigger({ function_id, payload, metadata, timeoutMs: timeout_ms }) }
  } catch (e) {
    return seen(e)
  }
})
register('notify', async ({ function_id, payload }) => {
  await worker.trigger({ function_id, payload, action: TriggerAction.Void() })
})
// push calls function_id with a reference to read size bytes from, which it puts
// into the payload as `field`.
register('push', async ({ function_id, payload, field, size, text, timeout_ms }) => {
  const channel = await createChannel(worker)
  const call = worker.trigger({
    function_id,
    payload: { ...payload, [field]: channel.readerRef },
    timeoutMs: timeout_ms ?? 60000,
  })
  const wrote = write(channel.writer, size, text).catch(seen)
  try {
    const result = await call
    await wrote
    return { result, sent: digest(bytes(size)) }
  } catch (e) {
    return seen(e)
  }
})
// pull calls function_id and reads the channel whose reference the reply has as
// `field`.
register('pull', async ({ function_id, payload, field, timeout_ms }) => {
  try {
    const result = await worker.trigger({ function_id, payload, timeoutMs: timeout_ms ?? 60000 })
    return { result, got: await read(new ChannelReader(url, result[field])) }
  } catch (e) {
    return seen(e)
  }
})

process.stdin.resume()
process.stdin.on('end', async () => {
  await worker.shutdown()
  process.exit(0)
})
console.log(`worker ${name} is up`)
