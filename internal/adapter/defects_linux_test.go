package adapter_test

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// The semantics' section 11: defects of earlier adapters, each shown to be absent,
// by their numbers. Not here are 3 (TestChecklist_LargeTransfers), 7 (TestSubtle
// 36), 10 (TestSubtle 37), 11 (TestChecklist_EarlyErrorOfAnUpload), 12 (the idle
// reaper) and 13 (a writable disk for each VM, on QEMU), both in package sandbox,
// 15 (TestSubtle 08) and 16 (package vm, which knows its processes by handles).

// 1: grep on a link to a directory never ended.
func TestDefect01_GrepOfALinkToADirectoryEnds(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	dir := h.dir(t, map[string]string{"d/sub/f": "foo\n"})
	link(t, dir+"/d", dir+"/link")
	link(t, "..", dir+"/d/up")
	list, _ := h.ok(t, "fs::grep", at(id, dir+"/link", obj{"pattern": "foo"}))["matches"].([]any)
	if len(list) != 1 {
		t.Errorf("%v", list)
	}
}

// 2: replies of more than 4 MiB vanished.
func TestDefect02_LargeRepliesArrive(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	out := h.sh(t, id, `head -c 1048576 /dev/zero; head -c 1048576 /dev/zero >&2`) // 12 MiB of JSON
	if text, _ := out["stdout"].(string); len(text) != 1<<20 {
		t.Errorf("%d bytes of stdout", len(text))
	}
	many := h.dir(t, nil)
	h.sh(t, id, "cd "+many+" && seq -f '%0250.0f' 14000 | xargs touch")
	if list, _ := h.ok(t, "fs::ls", at(id, many))["entries"].([]any); len(list) != 14_000 {
		t.Errorf("%d entries", len(list))
	}
	long := h.file(t, "long", strings.Repeat(strings.Repeat("x", 4095)+"\n", 10_000)) // 40 MB of matches
	out = h.ok(t, "fs::grep", at(id, long, obj{"pattern": "x"}))
	list, _ := out["matches"].([]any)
	if out["truncated"] != true || len(list) < 100 {
		t.Errorf("%d matches, truncated %v", len(list), out["truncated"])
	}
}

// 4: a VM took 16 connections at a time.
func TestDefect04_FortyCallsInOneSandbox(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{config: `{"image_allowlist":["python"],"max_concurrent_exec_per_sandbox":40}`})
	id := h.create(t)
	dir := h.dir(t, nil)
	var group sync.WaitGroup
	for i := range 40 {
		group.Go(func() {
			h.sh(t, id, fmt.Sprintf("touch %s/%d; while [ ! -e %s/go ]; do sleep 0.05; done", dir, i, dir))
		})
	}
	eventually(t, "forty programs at once", func() bool { return len(dirNames(t, dir)) == 40 })
	h.ok(t, "fs::write", at(id, dir+"/go", obj{"content": ""}))
	group.Wait()
}

// 5: a large stdin that nobody read blocked everything in its VM.
func TestDefect05_UnreadStdinBlocksNobody(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	up := h.dir(t, nil) + "/up"
	stdin := base64.StdEncoding.EncodeToString(make([]byte, 8<<20))
	var group sync.WaitGroup
	group.Go(func() {
		h.fails(t, "exec", shell(id, "touch "+up+"; sleep 1000", obj{"stdin": stdin}), "S300")
	})
	eventually(t, "start of the program", func() bool { return exists(up) })
	h.sh(t, id, "true")
	h.ok(t, "stop", obj{"sandbox_id": id, "wait": true})
	group.Wait()
	id = h.create(t)
	if out := h.sh(t, id, "wc -c", obj{"stdin": stdin}); strings.TrimSpace(fmt.Sprint(out["stdout"])) != "8388608" {
		t.Errorf("%v", out)
	}
	if out := h.sh(t, id, "exit 4", obj{"stdin": stdin}); out["exit_code"] != 4.0 {
		t.Errorf("a program that does not read: %v", out)
	}
}

// 6: creates at the same time went over the limit.
func TestDefect06_CreatesKeepTheLimit(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{config: `{"image_allowlist":["python"],"max_concurrent_sandboxes":3}`})
	var made, refused atomic.Int32
	var group sync.WaitGroup
	for range 12 {
		group.Go(func() {
			_, err := h.invoke("create", obj{"image": "python"})
			if err == nil {
				made.Add(1)
			} else if envelope(t, err)["code"] == "S400" {
				refused.Add(1)
			}
		})
	}
	group.Wait()
	if made.Load() != 3 || refused.Load() != 9 {
		t.Errorf("%d made, %d refused", made.Load(), refused.Load())
	}
}

// 8: a recursive chmod went through links, and failed at dangling ones.
func TestDefect08_ChmodStaysInItsTree(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	dir := h.dir(t, map[string]string{"outside": "", "tree/a/b": "", "tree/a/c": ""})
	link(t, dir+"/outside", dir+"/tree/out")
	link(t, "nowhere", dir+"/tree/dangling")
	same(t, "chmod", h.ok(t, "fs::chmod", at(id, dir+"/tree", obj{"mode": "0700", "recursive": true})), obj{"updated": 4})
	if got := mode(t, dir+"/outside"); got != "0644" {
		t.Errorf("the file outside has mode %s", got)
	}
}

// 9: a directory could not be moved to another file system.
func TestDefect09_DirectoriesMoveAcrossFileSystems(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	other, err := os.MkdirTemp("/dev/shm", "vmt")
	if err != nil {
		t.Skipf("SKIPPED: no second file system: %v", err)
	}
	defer func() { _ = os.RemoveAll(other) }()
	dir := h.dir(t, map[string]string{"tree/a/f": "content"})
	if device(t, dir) == device(t, other) {
		t.Skip("SKIPPED: /dev/shm is the same file system")
	}
	link(t, "f", dir+"/tree/a/link")
	id := h.create(t)
	h.ok(t, "fs::mv", obj{"sandbox_id": id, "src": dir + "/tree", "dst": other + "/tree"})
	if content(t, other+"/tree/a/f") != "content" || !isLink(other+"/tree/a/link") || exists(dir+"/tree") {
		t.Error("the tree is not there as it was")
	}
	same(t, "the target", dirNames(t, other), []string{"tree"})
}

func device(t testing.TB, path string) uint64 {
	t.Helper()
	var stat syscall.Stat_t
	if err := syscall.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Dev
}

// 14: what a failed create had made stayed.
func TestDefect14_FailedCreatesLeaveNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{config: `{"image_allowlist":["python","refused"],"custom_images":{"refused":"127.0.0.1:1/refused:1"},"max_concurrent_sandboxes":1}`})
	for range 3 {
		h.fails(t, "create", obj{"image": "refused"}, "S102")
	}
	h.env.CheckEmpty(t)
	h.create(t) // the slot is free
}

// 17: creates of one image that is not there pulled it several times, into each
// other's way.
func TestDefect17_CreatesShareAPull(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	var group sync.WaitGroup
	for range 6 {
		group.Go(func() {
			if _, err := h.invoke("create", obj{"image": "python"}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

// 18: a FIFO, or a device without end, held a call for ever.
func TestDefect18_SpecialFilesHoldNothingUp(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	dir := h.dir(t, map[string]string{"f": "foo\n"})
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, "/dev/zero"} {
		h.fails(t, "fs::read", at(id, path), "S212")
		h.fails(t, "fs::grep", at(id, path, obj{"pattern": "foo"}), "S212")
		out := h.ok(t, "fs::sed", obj{"sandbox_id": id, "files": []string{path}, "pattern": "foo", "replacement": "bar"})
		if list, _ := out["results"].([]any); list[0].(obj)["success"] != false {
			t.Errorf("sed on %s: %v", path, out)
		}
	}
	if list, _ := h.ok(t, "fs::grep", at(id, dir, obj{"pattern": "foo"}))["matches"].([]any); len(list) != 1 {
		t.Errorf("%v", list)
	}
	if list, _ := h.ok(t, "fs::sed", at(id, dir, obj{"pattern": "foo", "replacement": "bar"}))["results"].([]any); len(list) != 1 {
		t.Errorf("%v", list)
	}
	h.ok(t, "fs::write", at(id, fifo, obj{"content": "now a file"}))
	if content(t, fifo) != "now a file" {
		t.Error("the FIFO was not replaced")
	}
}
