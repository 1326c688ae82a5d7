package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"
)

type ruleKey struct{}
type lineKey struct{}

var errCut = errors.New("cut on purpose")

// newProxy is the handler of one door.
func newProxy(door Door, config Config, state *State) http.Handler {
	scheme := "http"
	transport := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	if door.Kind == "https" {
		scheme, transport.TLSClientConfig = "https", theirs(config)
	}
	target := &url.URL{Scheme: scheme, Host: door.Target}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host
		},
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      quiet(),
		ModifyResponse: func(answer *http.Response) error {
			state.answered(answer.Request.Context().Value(lineKey{}).(*Request), answer.StatusCode)
			rule, _ := answer.Request.Context().Value(ruleKey{}).(*Rule)
			return changed(rule, answer, door)
		},
		// The target cannot be reached, or the answer is to be lost: the connection ends without one.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		line := state.begin(door.Name, r, cancel)
		defer state.end(line)
		rule := state.choose(line)
		if rule != nil {
			wait(ctx, rule)
			if ctx.Err() != nil || (rule.Cut && !rule.After) {
				panic(http.ErrAbortHandler)
			}
			if rule.Status != 0 && !rule.After {
				state.answered(line, rule.Status)
				refuse(w, rule, door)
				return
			}
			if rule.Gone {
				state.answered(line, http.StatusOK)
				gone(w)
				return
			}
			ctx = context.WithValue(ctx, ruleKey{}, rule)
		}
		ctx = context.WithValue(ctx, lineKey{}, line)
		proxy.ServeHTTP(w, r.WithContext(ctx))
	})
}

// wait passes the rule's delay, or the time until it is taken away.
func wait(ctx context.Context, rule *Rule) {
	var after <-chan time.Time
	if !rule.Hang {
		after = time.After(time.Duration(rule.Delay * float64(time.Second)))
	}
	select {
	case <-after:
	case <-rule.removed:
	case <-ctx.Done():
	}
}

// changed is what a rule makes of the target's answer.
func changed(rule *Rule, answer *http.Response, door Door) error {
	if rule == nil {
		return nil
	}
	if rule.After {
		// All of it was done and said: only the client never hears.
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
		if rule.Cut {
			return errCut
		}
		body := sentence(rule, door)
		answer.StatusCode, answer.Status = rule.Status, fmt.Sprint(rule.Status, " ", http.StatusText(rule.Status))
		answer.Header = http.Header{"Content-Type": {"application/json"}}
		for name, value := range rule.Headers {
			answer.Header.Set(name, value)
		}
		answer.ContentLength, answer.Body = int64(len(body)), io.NopCloser(bytes.NewReader(body))
		return nil
	}
	if rule.CutAt > 0 || rule.Rate > 0 {
		answer.Body = &badBody{ReadCloser: answer.Body, rule: rule, context: answer.Request.Context()}
	}
	return nil
}

// badBody comes slowly, or ends early.
type badBody struct {
	io.ReadCloser
	rule    *Rule
	context context.Context
	read    int64
}

func (body *badBody) Read(into []byte) (int, error) {
	if at := body.rule.CutAt; at > 0 {
		if body.read >= at {
			return 0, errCut
		}
		into = into[:min(int64(len(into)), at-body.read)]
	}
	if rate := body.rule.Rate; rate > 0 {
		into = into[:min(int64(len(into)), max(1, rate/20))]
	}
	n, err := body.ReadCloser.Read(into)
	body.read += int64(n)
	if rate := body.rule.Rate; rate > 0 && n > 0 {
		select {
		case <-time.After(time.Duration(float64(n) / float64(rate) * float64(time.Second))):
		case <-body.rule.removed:
		case <-body.context.Done():
		}
	}
	return n, err
}

func refuse(w http.ResponseWriter, rule *Rule, door Door) {
	w.Header().Set("Content-Type", "application/json")
	for name, value := range rule.Headers {
		w.Header().Set(name, value)
	}
	w.WriteHeader(rule.Status)
	_, _ = w.Write(sentence(rule, door))
}

// sentence is the body of an error, as an API server or a registry would say it.
func sentence(rule *Rule, door Door) []byte {
	message := rule.Message
	if message == "" {
		message = http.StatusText(rule.Status)
	}
	var said any
	if door.Says == "registry" {
		word := rule.Reason
		if word == "" {
			word = strings.ToUpper(strings.ReplaceAll(http.StatusText(rule.Status), " ", "_"))
		}
		said = map[string]any{"errors": []any{map[string]any{"code": word, "message": message}}}
	} else {
		said = status(rule.Status, rule.Reason, message, rule.Headers["Retry-After"])
	}
	text, _ := json.Marshal(said)
	return text
}

func status(code int, reason, message, after string) map[string]any {
	said := map[string]any{
		"kind": "Status", "apiVersion": "v1", "metadata": map[string]any{}, "status": "Failure",
		"message": message, "reason": reason, "code": code,
	}
	if after != "" {
		said["details"] = map[string]any{"retryAfterSeconds": json.Number(after)}
	}
	return said
}

// gone ends a watch as an API server does that no longer has the events since the version that was asked for.
func gone(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	event := map[string]any{"type": "ERROR", "object": status(410, "Expired", "too old resource version: 1 (2)", "")}
	text, _ := json.Marshal(event)
	_, _ = w.Write(append(text, '\n'))
}
