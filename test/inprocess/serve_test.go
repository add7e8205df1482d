package inprocess

import (
	"encoding/json"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// An application is deployed, is RUNNING, answers, and is deleted.
func TestFromDeployToAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(1))
		c.Deploy(simApp("chat", 4, "independent", "sim_step_ms: 10"))
		st := c.WaitStatus("chat", "RUNNING")
		assert.Equal(t, 4, st.Ready)

		s := c.StreamChat(t.Context(), "chat", 20)
		require.True(t, s.OK(), s)
		assert.Equal(t, 20, s.Chunks)

		resp, err := c.Post(t.Context(), "/v1/chat/completions", harness.Chat("chat", "hello", 20, false))
		require.NoError(t, err)
		defer resp.Body.Close()
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		var answer struct {
			Choices []struct {
				Message struct{ Content string }
			}
			Usage struct {
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		require.Len(t, answer.Choices, 1)
		assert.NotEmpty(t, answer.Choices[0].Message.Content)
		assert.Equal(t, 20, answer.Usage.CompletionTokens)

		c.Quiet()
		c.Delete("chat")
		c.Until("chat gone", gone(c, "chat"))
		assert.Empty(t, c.Engines.Live())
	})
}
