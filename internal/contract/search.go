package contract

// The texts and examples of the functions in this file. The examples are the
// contract's.
const (
	grepText = "Find the lines of a sandbox's files that match a regular expression, below a directory or in one file. Binary files " +
		"are passed over."
	grepExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/src","pattern":"TODO|FIXME","recursive":true,` +
		`"include_glob":["**/*.js","**/*.ts"]}`
	sedText = "Replace in a sandbox's files, line by line: in the ones listed in files, or in all below path. Each file changes " +
		"completely or not at all, and has a result of its own."
	sedExample = `{"sandbox_id":"00000000-0000-0000-0000-000000000000","path":"/home/app/src","pattern":"foo","replacement":"bar","recursive":true}`
)

// GrepRequest asks for a search.
type GrepRequest struct {
	SandboxID    string   `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path         string   `json:"path" required:"true" doc:"Where to search, as an absolute path in the sandbox: a file, or with recursive a directory."`
	Pattern      string   `json:"pattern" required:"true" doc:"A regular expression in the syntax of Rust's regex crate; it need not match the whole line."`
	Recursive    bool     `json:"recursive" doc:"Search a directory with all below it; without it a directory is S210."`
	IgnoreCase   bool     `json:"ignore_case" doc:"Take capital and small letters for the same."`
	IncludeGlob  []string `json:"include_glob" doc:"Search only files that match one of these gitignore patterns, relative to path."`
	ExcludeGlob  []string `json:"exclude_glob" doc:"Pass over what matches one of these gitignore patterns, relative to path."`
	MaxMatches   uint64   `json:"max_matches" doc:"Stop after so many matches; 0 does not."`
	MaxLineBytes uint64   `json:"max_line_bytes" doc:"Cut longer lines to so many bytes, with an ellipsis behind; 0 does not."`
}

func (r *GrepRequest) applyDefaults() {
	r.Recursive, r.MaxMatches, r.MaxLineBytes = true, 10_000, 4096
}

// GrepResponse is the reply of fs::grep.
type GrepResponse struct {
	Matches   []FsMatch `json:"matches" doc:"In the order of their paths."`
	Truncated bool      `json:"truncated" doc:"A limit ended the search: there may be more."`
}

// FsMatch is a line that matches.
type FsMatch struct {
	Path    string `json:"path"`
	Line    uint64 `json:"line" doc:"Counted from 1."`
	Content string `json:"content" doc:"The line without its end, cut to max_line_bytes."`
}

// SedRequest asks for a replacement.
type SedRequest struct {
	SandboxID   string   `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Files       []string `json:"files" doc:"The files to change. Exactly one of files and path is given."`
	Path        *string  `json:"path" doc:"A file, or a directory whose files are changed, those below it too. Exactly one of files and path is given."`
	Pattern     string   `json:"pattern" required:"true" doc:"A regular expression in the syntax of Rust's regex crate, or with regex:false the text itself. It is applied to each line with its line end."`
	Replacement string   `json:"replacement" required:"true" doc:"What to put there. $1, ${name} and $$ are groups and a dollar, unless regex is false."`
	Recursive   bool     `json:"recursive" doc:"With path: change also what is below a directory; without it a directory is S210."`
	IncludeGlob []string `json:"include_glob" doc:"With path: change only files that match one of these gitignore patterns, relative to path."`
	ExcludeGlob []string `json:"exclude_glob" doc:"With path: pass over what matches one of these gitignore patterns, relative to path."`
	Regex       bool     `json:"regex" doc:"Whether pattern is a regular expression."`
	FirstOnly   bool     `json:"first_only" doc:"Replace only the first match of each line."`
	IgnoreCase  bool     `json:"ignore_case" doc:"Take capital and small letters for the same."`
}

func (r *SedRequest) applyDefaults() { r.Recursive, r.Regex = true, true }

// SedResponse is the reply of fs::sed.
type SedResponse struct {
	Results           []FsSedFileResult `json:"results" doc:"One for each file that was looked at, changed or not."`
	TotalReplacements uint64            `json:"total_replacements"`
}

// FsSedFileResult is what became of one file.
type FsSedFileResult struct {
	Path         string  `json:"path"`
	Replacements uint64  `json:"replacements"`
	Success      bool    `json:"success"`
	Error        *string `json:"error,omitempty" doc:"Why the file was left as it was; absent where success is true."`
}
