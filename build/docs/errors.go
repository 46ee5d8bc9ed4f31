package main

import (
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

const errorsHead = `# Errors

Made by ` + "`make generate`" + ` from the table in ` + "`internal/fault`" + `.

A function that fails answers with the engine's error code ` + "`invocation_failed`" + `; the error's message is a JSON object,
which clients find by parsing the message from its first ` + "`{`" + ` on (some SDKs put words in front):

` + "```json"

const errorsFields = "```" + `

All seven keys are always there.

| key | meaning |
|---|---|
| ` + "`code`" + ` | the S-code, see below |
| ` + "`type`" + ` | the category of the code |
| ` + "`message`" + ` | what was wrong and what to do about it, for people |
| ` + "`docs_url`" + ` | where the code is explained |
| ` + "`retryable`" + ` | whether the same request may succeed later |
| ` + "`fix`" + ` | null, or an object to merge into the request before sending it again; errors of run have there the step that failed, the sandbox's id (empty when none was made) and the inner code |
| ` + "`fix_note`" + ` | null, or what to do, in words |

A program that fails is no error: exec and run return its exit code, 127 where it was not found and 126 where it may not
be run. What does not decode as JSON of the right shape is S001 too, and names the field.

## Codes

S301 to S303 are the engine's own, when no adapter answers.

| code | type | retry | functions | meaning |
|---|---|---|---|---|`

// errorsPage is docs/errors.md.
func errorsPage() []byte {
	var p page
	p.linef("%s", errorsHead)
	p.linef("%s", indented([]byte(fault.ParentMissing("/home/app/index.js", "/home/app", nil).Envelope())))
	p.linef("%s", errorsFields)
	for _, code := range fault.Codes() {
		meaning, by := code.Meaning()
		retry := "no"
		if code.Retryable() {
			retry = "yes"
		}
		p.linef("| <a id=\"%s\"></a>%s | %s | %s | %s | %s |", code, code, code.Type(), retry, cell(by), cell(meaning))
	}
	p.linef("\nThe ids of the functions begin with `%s`.", contract.Prefix)
	return p.Bytes()
}

// cell makes text fit a table's cell.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "*", `\*`, "<", "&lt;", "_", `\_`).Replace(text)
}
