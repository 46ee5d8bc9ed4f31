package contract

// The texts and examples of the functions in this file. The examples are the
// contract's.
const (
	lsText      = "List a directory of a sandbox, sorted by name. Links are described, not followed."
	lsExample   = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app"}`
	statText    = "Describe a file or directory of a sandbox. A link is described, not followed."
	statExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/index.js"}`

	mkdirText    = "Make a directory in a sandbox. With parents:true missing parents are made too, and one that is there already is no error."
	mkdirExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/cache","mode":"0755","parents":true}`
	rmText       = "Remove a file, or with recursive:true a directory with all that is in it. Links are removed, not followed."
	rmExample    = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/temp","recursive":true}`
	chmodText    = "Set the mode of a file or directory, and its owner where uid or gid is given; with recursive:true also of what is below."
	chmodExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/script.sh","mode":"0755"}`
	mvText       = "Move or rename a file or directory. dst is the new path itself, not a directory to move into; with overwrite:true " +
		"one that is there is replaced."
	mvExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","src":"/home/app/old.js","dst":"/home/app/new.js","overwrite":false}`

	writeText = "Write a file: text in content, a few bytes in content_b64, or anything large through a channel whose reader is in " +
		"content. The file appears complete or not at all."
	writeExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/index.js","mode":"0644","parents":true,` +
		`"content":"console.log('hello world')\n"}`
	readText = "Read a file. content is a channel with all of its bytes; text of less than 1 MiB is in body as well, so that the " +
		"channel can be left alone."
	readExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/index.js"}`
)

// LsRequest asks for a directory's entries.
type LsRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string `json:"path" required:"true" doc:"The directory, as an absolute path in the sandbox."`
}

// LsResponse is the reply of fs::ls.
type LsResponse struct {
	Entries []FsEntry `json:"entries"`
}

// FsEntry describes a file, a link itself rather than its target.
type FsEntry struct {
	Name      string `json:"name" doc:"Last part of the path; what is not UTF-8 was replaced."`
	IsDir     bool   `json:"is_dir"`
	Size      uint64 `json:"size" doc:"In bytes."`
	Mode      string `json:"mode" doc:"Permissions in octal, as in 0644."`
	Mtime     int64  `json:"mtime" doc:"Last change, in seconds since 1970."`
	IsSymlink bool   `json:"is_symlink"`
}

// StatRequest asks for a description of a file.
type StatRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string `json:"path" required:"true" doc:"An absolute path in the sandbox."`
}

// StatResponse is the reply of fs::stat.
type StatResponse FsEntry

// MkdirRequest asks for a directory.
type MkdirRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string `json:"path" required:"true" doc:"The new directory, as an absolute path in the sandbox."`
	Mode      string `json:"mode" doc:"Its permissions, in octal."`
	Parents   bool   `json:"parents" doc:"Make missing parents too, as mkdir -p does."`
}

func (r *MkdirRequest) applyDefaults() { r.Mode = "0755" }

// MkdirResponse is the reply of fs::mkdir.
type MkdirResponse struct {
	Created bool `json:"created" doc:"False where parents is true and the directory was there."`
}

// RmRequest asks for a removal.
type RmRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string `json:"path" required:"true" doc:"An absolute path in the sandbox."`
	Recursive bool   `json:"recursive" doc:"Remove a directory with all that is in it."`
}

// RmResponse is the reply of fs::rm.
type RmResponse struct {
	Removed bool `json:"removed" doc:"Always true."`
}

// ChmodRequest asks for other permissions or another owner.
type ChmodRequest struct {
	SandboxID string  `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string  `json:"path" required:"true" doc:"An absolute path in the sandbox."`
	Mode      string  `json:"mode" required:"true" doc:"Permissions in octal, as in 0644 or 0755."`
	UID       *uint32 `json:"uid" doc:"The new owner, unchanged by default."`
	GID       *uint32 `json:"gid" doc:"The new group, unchanged by default."`
	Recursive bool    `json:"recursive" doc:"Go on to everything below path; links are passed over."`
}

// ChmodResponse is the reply of fs::chmod.
type ChmodResponse struct {
	Updated uint64 `json:"updated" doc:"How many files and directories were set, path itself included."`
}

// MvRequest asks for a new path.
type MvRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Src       string `json:"src" required:"true" doc:"What to move, as an absolute path in the sandbox."`
	Dst       string `json:"dst" required:"true" doc:"Its new absolute path in the sandbox."`
	Overwrite bool   `json:"overwrite" doc:"Replace what is at dst already."`
}

// MvResponse is the reply of fs::mv.
type MvResponse struct {
	Moved bool `json:"moved" doc:"Always true."`
}
