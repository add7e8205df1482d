package engine_test

import (
	"encoding/binary"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine"
)

// An engine that does not generate is asked for what it does. Its refusal to generate is the error if it does
// nothing else either.
func TestProbeOfAnEngineThatDoesNotGenerate(t *testing.T) {
	noRoute, noModel := `{"detail":"Not Found"}`, `{"error":{"message":"The model m does not exist."}}`
	for name, c := range map[string]struct {
		serves, refusal string
		status          int
		want            string
	}{
		"embeddings": {"/v1/embeddings", noRoute, 404, ""},
		"rerank":     {"/v1/rerank", noRoute, 404, ""},
		"classes":    {"/classify", noRoute, 404, ""},
		"pooling":    {"/pooling", noRoute, 404, ""},
		"speech":     {"/v1/audio/speech", noRoute, 404, ""},
		"sounds":     {"/v1/audio/transcriptions", noRoute, 404, ""},
		"a model that cannot": {
			"/v1/embeddings", `{"object":"error","message":"not a generation model"}`, 400, "",
		},
		"nothing": {"/x", noRoute, 404, "/v1/chat/completions answered 404"},
		"other model": {
			"/v1/embeddings", noModel, 404, "/v1/completions answered 404: The model m does not exist.",
		},
		"broken": {"/v1/embeddings", "", 500, "/v1/completions answered 500"},
	} {
		t.Run(name, func(t *testing.T) {
			client := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == c.serves && strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
					file, _, err := r.FormFile("file")
					if assert.NoError(t, err) {
						wav, _ := io.ReadAll(file)
						assert.Equal(t, "RIFF", string(wav[:4]))
						assert.EqualValues(t, len(wav)-8, binary.LittleEndian.Uint32(wav[4:]))
					}
					assert.Equal(t, "m", r.FormValue("model"))
					return
				}
				if r.URL.Path == c.serves {
					body, _ := io.ReadAll(r.Body)
					assert.Contains(t, string(body), `"model":"m"`)
					return
				}
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.refusal)
			})
			err := client.Probe(t.Context(), "m")
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, c.want)
		})
	}
}
