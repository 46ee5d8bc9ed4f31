// Uses every function of an adapter on real VMs as a caller with the iii-sdk of
// npm does. The text of MARK is in everything that must not be logged.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { registerWorker } from 'iii-sdk'
import { ChannelReader } from 'iii-sdk/channel'
import { createChannel } from 'iii-sdk/helpers'

const { III_URL: url, IMAGE: image, MARK: mark } = process.env
const adapter = 'sandbox-libkrun'
const client = registerWorker(url, { workerName: 'real-client' })
const called = new Set()

// call calls a function of the adapter; it may take two minutes.
function call(leaf, payload) {
  const function_id = `${adapter}::${leaf}`
  called.add(function_id)
  return client.trigger({ function_id, payload, timeoutMs: 120000 })
}

// refused returns the error of a call that fails with the S-code. It is the text
// of the message from its first brace on.
async function refused(code, leaf, payload) {
  let error
  try {
    const result = await call(leaf, payload)
    assert.fail(`${leaf} was to fail with ${code}: ${JSON.stringify(result)}`)
  } catch (e) {
    if (e instanceof assert.AssertionError) throw e
    error = e
  }
  assert.equal(error.code, 'invocation_failed')
  const fault = JSON.parse(error.message.slice(error.message.indexOf('{')))
  assert.deepEqual(Object.keys(fault).sort(), ['code', 'docs_url', 'fix', 'fix_note', 'message', 'retryable', 'type'])
  assert.equal(fault.code, code, error.message)
  assert.ok(fault.docs_url.endsWith(`#${code}`))
  return fault
}

async function step(name, work) {
  const began = performance.now()
  const result = await work()
  console.log(`${name}: ${Math.round(performance.now() - began)} ms`)
  return result
}

const sha256 = (data) => createHash('sha256').update(data).digest('hex')

// upload writes data to a file through a channel; text, where given, goes ahead.
async function upload(payload, data, text) {
  const { writer, readerRef } = await createChannel(client)
  const sent = new Promise((resolve, reject) => writer.stream.on('finish', resolve).on('error', reject))
  const wrote = call('fs::write', { ...payload, content: readerRef })
  if (text) writer.sendMessage(text)
  writer.stream.end(data)
  const [reply] = await Promise.all([wrote, sent])
  return reply
}

// download reads a file through its channel.
async function download(payload) {
  const reply = await call('fs::read', payload)
  return { ...reply, data: await new ChannelReader(url, reply.content).readAll() }
}

async function lifecycle() {
  const info = await call('adapter::info', {})
  assert.equal(info.adapter, adapter)
  assert.deepEqual(info.contract, { major: 1, minor: 1 })
  const { images } = await call('catalog::list', {})
  assert.deepEqual(images.map((i) => [i.name, i.kind]), [['python', 'preset'], ['node', 'preset'], [image, 'custom']])

  const run = await step('run', () =>
    call('run', {
      image, lang: 'shell', code: 'cat /lib/beside -; echo "$MARK"; exit 3', keep_sandbox: true,
      stdin: Buffer.from(`stdin ${mark}\n`).toString('base64'), env: { MARK: mark },
      files: [{ path: '/lib/beside', content: `file ${mark}\n` }],
    }))
  assert.equal(run.stdout, `file ${mark}\nstdin ${mark}\n${mark}\n`)
  assert.deepEqual([run.exit_code, run.success, run.timed_out, run.stdout_truncated], [3, false, false, false])

  const made = await step('create', () => call('create', { image, name: 'mine', memory_mb: 256, env: [`MARK=${mark}`] }))
  assert.equal(made.image, image)
  const { sandboxes } = await call('list', {})
  assert.deepEqual(sandboxes.map((s) => [s.sandbox_id, s.name, s.exec_slots_free, s.stopped]),
    [[run.sandbox_id, null, 1, false], [made.sandbox_id, 'mine', 1, false]])
  const full = await refused('S400', 'create', { image })
  assert.deepEqual([full.type, full.retryable, full.fix], ['config', false, null])

  assert.deepEqual(await step('stop', () => call('stop', { sandbox_id: run.sandbox_id.toUpperCase(), wait: true })),
    { sandbox_id: run.sandbox_id, stopped: true })
  assert.match((await refused('S002', 'stop', { sandbox_id: run.sandbox_id })).message, new RegExp(run.sandbox_id))
  return made.sandbox_id
}

async function programs(sandbox_id) {
  const echo = await call('exec', { sandbox_id, cmd: 'cat', stdin: Buffer.from(`π ${mark}`).toString('base64') })
  assert.equal(echo.stdout, `π ${mark}`)
  assert.equal(echo.success, true)
  const env = await call('exec', { sandbox_id, argv: ['sh', '-c', 'echo $MARK $B $PWD; echo bad >&2; exit 7'], env: { B: mark }, workdir: '/tmp' })
  assert.deepEqual([env.stdout, env.stderr, env.exit_code], [`${mark} ${mark} /tmp\n`, 'bad\n', 7])
  assert.equal((await call('exec', { sandbox_id, cmd: 'no-such-program' })).exit_code, 127)
  const much = await call('exec', { sandbox_id, argv: ['sh', '-c', 'head -c 1048577 /dev/zero | tr "\\0" x'] })
  assert.deepEqual([much.stdout.length, much.stdout_truncated, much.stderr_truncated], [1 << 20, true, false])
  // One slot: a program that runs takes it, and is killed at its deadline.
  const slow = refused('S200', 'exec', { sandbox_id, cmd: 'sleep 100', timeout_ms: 3000 })
  for (;;) {
    const { sandboxes } = await call('list', {})
    if (sandboxes[0].exec_in_flight === 1) break
  }
  assert.match((await refused('S003', 'exec', { sandbox_id, cmd: 'true' })).fix_note, /foreground/)
  assert.match((await slow).message, /3000/)
}

async function errors(sandbox_id) {
  await refused('S001', 'fs::ls', { sandbox_id: 'x', path: '/' })
  await refused('S001', 'fs::ls', { sandbox_id, path: 5 })
  await refused('S001', 'exec', { sandbox_id, cmd: 'a b', args: ['c'] })
  assert.match((await refused('S100', 'create', { image: 'no-such-image' })).message, new RegExp(image))
  assert.equal((await refused('S211', 'fs::stat', { sandbox_id, path: '/none' })).type, 'filesystem')
  await refused('S212', 'fs::ls', { sandbox_id, path: '/etc/passwd' })
  await refused('S217', 'fs::grep', { sandbox_id, path: '/etc', pattern: '(' })
  const nested = await refused('S001', 'run', { image, lang: '', code: '' })
  assert.equal(nested.fix.inner_code, 'S001')
}

async function files(sandbox_id) {
  const text = { sandbox_id, path: '/data/sub/text', content: `one ${mark}\ntwo\n` }
  const parent = await refused('S211', 'fs::write', text)
  assert.deepEqual(parent.fix, { parents: true })
  assert.deepEqual(await call('fs::write', { ...text, ...parent.fix }), { bytes_written: Buffer.byteLength(text.content), path: text.path })
  const read = await download({ sandbox_id, path: text.path })
  assert.equal(read.body, text.content)
  assert.equal(read.data.toString(), text.content)
  assert.deepEqual(await call('fs::mkdir', { sandbox_id, path: '/data/dir', mode: '0700' }), { created: true })
  await refused('S213', 'fs::mkdir', { sandbox_id, path: '/data/dir' })
  assert.deepEqual(await call('fs::chmod', { sandbox_id, path: text.path, mode: '0750', uid: 7, gid: 8 }), { updated: 1 })
  const stat = await call('fs::stat', { sandbox_id, path: text.path })
  assert.deepEqual([stat.name, stat.mode, stat.size, stat.is_dir], ['text', '0750', Buffer.byteLength(text.content), false])
  assert.deepEqual(await call('fs::mv', { sandbox_id, src: text.path, dst: '/tmp/moved' }), { moved: true }) // another file system
  assert.deepEqual((await call('fs::grep', { sandbox_id, path: '/tmp', pattern: '^t\\wo$', include_glob: ['mov*'] })).matches,
    [{ path: '/tmp/moved', line: 2, content: 'two' }])
  const sed = await call('fs::sed', { sandbox_id, files: ['/tmp/moved', '/none'], pattern: '(t)wo', replacement: '${1}hree' })
  assert.deepEqual([sed.total_replacements, sed.results.map((r) => r.success)], [1, [true, false]])
  assert.equal((await call('exec', { sandbox_id, cmd: 'cat /tmp/moved' })).stdout, `one ${mark}\nthree\n`)
  const { entries } = await call('fs::ls', { sandbox_id, path: '/data' })
  assert.deepEqual(entries.map((e) => [e.name, e.is_dir, e.mode]), [['dir', true, '0700'], ['sub', true, '0755']])
  await refused('S214', 'fs::rm', { sandbox_id, path: '/data' })
  assert.deepEqual(await call('fs::rm', { sandbox_id, path: '/data', recursive: true }), { removed: true })
}

async function transfers(sandbox_id) {
  const path = '/file'
  // The writer of this SDK connects when it has something to send: with no bytes
  // it never does, and the upload stalls, unless a text goes ahead.
  assert.equal((await upload({ sandbox_id, path }, Buffer.alloc(0), 'nothing follows')).bytes_written, 0)
  assert.equal((await download({ sandbox_id, path })).data.length, 0)
  const stalled = await step('0 bytes without a connection', () =>
    upload({ sandbox_id, path: '/stalled' }, Buffer.alloc(0)).then(() => assert.fail('it was written'), (e) => e.message))
  assert.deepEqual([JSON.parse(stalled.slice(stalled.indexOf('{'))).code, JSON.parse(stalled.slice(stalled.indexOf('{'))).retryable], ['S218', true])
  await refused('S211', 'fs::stat', { sandbox_id, path: '/stalled' })

  for (const size of [1, (1 << 20) - 1, 1 << 20, 50 << 20]) {
    const data = randomBytes(size)
    const reply = await step(`upload ${size}`, () => upload({ sandbox_id, path, mode: '0600' }, data))
    assert.deepEqual(reply, { bytes_written: size, path })
    const inside = await step(`checksum ${size} in the guest`, () => call('exec', { sandbox_id, cmd: `sha256sum ${path}` }))
    assert.equal(inside.stdout.split(' ')[0], sha256(data))
    const back = await step(`download ${size}`, () => download({ sandbox_id, path }))
    assert.deepEqual([back.size, back.mode, sha256(back.data)], [size, '0600', sha256(data)])
  }
  // Who refuses the file does not wait for its bytes.
  const { readerRef } = await createChannel(client)
  await refused('S211', 'fs::write', { sandbox_id, path: '/none/x', content: readerRef })
}

const sandbox_id = await lifecycle()
await step('programs', () => programs(sandbox_id))
await step('errors', () => errors(sandbox_id))
await step('files', () => files(sandbox_id))
await step('transfers', () => transfers(sandbox_id))

const { functions } = await client.trigger({ function_id: 'engine::functions::list', payload: { worker: adapter } })
assert.deepEqual([...called].sort(), functions.map((f) => f.function_id).sort())
assert.equal(called.size, 17)
await client.shutdown()
process.exit(0) // the SDK has timers
