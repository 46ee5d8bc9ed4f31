package contract

import (
	"encoding/json"
	"reflect"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

// WriteRequest asks for a file to be written. Exactly one of Content and
// ContentB64 must be set, which decoding does not check.
type WriteRequest struct {
	SandboxID  string        `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path       string        `json:"path" required:"true" doc:"The file, as an absolute path in the sandbox."`
	Mode       string        `json:"mode" doc:"Its permissions, in octal, also where the file was there already."`
	Parents    bool          `json:"parents" doc:"Make missing parent directories."`
	Content    *WriteContent `json:"content" doc:"The file's text, or the reader of a channel with its bytes. Exactly one of content and content_b64 is given."`
	ContentB64 *string       `json:"content_b64" doc:"The file's bytes in base64. Exactly one of content and content_b64 is given."`
}

func (r *WriteRequest) applyDefaults() { r.Mode = "0644" }

// WriteContent is a file's body: text, or a channel where Channel is set.
type WriteContent struct {
	Text    string
	Channel *StreamChannelRef
}

// DecodeStrict is strictjson.Decoder.
func (c *WriteContent) DecodeStrict(raw json.RawMessage, path string) error {
	*c = WriteContent{}
	switch strictjson.Kind(raw) {
	case "a string":
		return strictjson.Decode(raw, path, &c.Text)
	case "an object":
		return strictjson.Decode(raw, path, &c.Channel)
	}
	return strictjson.Expected("a string or a channel's reader", raw, path)
}

func (WriteContent) shape(r *reflector) *schema {
	return &schema{
		Description: "The content of a file.",
		AnyOf: []*schema{
			{Type: "string", Description: "Text, written as it is."},
			{AllOf: []*schema{r.define(reflect.TypeFor[StreamChannelRef]())}, Description: "The reader of a channel, for what is large or binary."},
		},
	}
}

// StreamChannelRef names one end of a channel of the engine.
type StreamChannelRef struct {
	ChannelID string           `json:"channel_id" required:"true"`
	AccessKey string           `json:"access_key" required:"true"`
	Direction ChannelDirection `json:"direction" required:"true"`
}

// ChannelDirection is what the holder of a channel's end does with it.
type ChannelDirection string

// The directions.
const (
	ReadEnd  ChannelDirection = "read"
	WriteEnd ChannelDirection = "write"
)

// DecodeStrict is strictjson.Decoder.
func (d *ChannelDirection) DecodeStrict(raw json.RawMessage, path string) error {
	var text string
	if err := strictjson.Decode(raw, path, &text); err != nil {
		return err
	}
	*d = ChannelDirection(text)
	if *d != ReadEnd && *d != WriteEnd {
		return &strictjson.Error{Path: path, Problem: `must be "read" or "write"`}
	}
	return nil
}

func (ChannelDirection) shape(*reflector) *schema {
	return &schema{Type: "string", Enum: []string{string(ReadEnd), string(WriteEnd)}}
}

// WriteResponse is the reply of fs::write.
type WriteResponse struct {
	BytesWritten uint64 `json:"bytes_written" doc:"The file's size."`
	Path         string `json:"path" doc:"The path, as it was asked for."`
}

// ReadRequest asks for a file's content.
type ReadRequest struct {
	SandboxID string `json:"sandbox_id" required:"true" doc:"The UUID that sandbox::create returned."`
	Path      string `json:"path" required:"true" doc:"The file, as an absolute path in the sandbox; a link is followed."`
}

// ReadResponse is the reply of fs::read.
type ReadResponse struct {
	Content StreamChannelRef `json:"content" doc:"The reader of a channel that carries the file's bytes; it must be used within 5 minutes."`
	Body    *string          `json:"body,omitempty" doc:"The content itself, where it is UTF-8 text of less than 1 MiB; else absent."`
	Size    uint64           `json:"size" doc:"In bytes, as the file system tells it; a reader that got less has not got all."`
	Mode    string           `json:"mode" doc:"Permissions in octal, as in 0644."`
	Mtime   int64            `json:"mtime" doc:"Last change, in seconds since 1970."`
}
